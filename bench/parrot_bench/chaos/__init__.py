"""`parrot-gateway bench chaos`: calls under faults, and an oracle that reads every byte of them."""
