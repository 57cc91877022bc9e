"""What the gateway knows about calls and models. No HTTP in here."""
