"""How this process was launched, signals, and how it ends."""
