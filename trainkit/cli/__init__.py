"""What a run prints: its plan, its progress, the machine it is on."""
