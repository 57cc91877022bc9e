"""LoRA adapters: read from PEFT folders, kept in host memory, copied to slots of a model."""
