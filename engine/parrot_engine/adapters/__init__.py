"""LoRA adapters: read from PEFT folders, kept in host memory, put into slots of a model."""
