"""What belongs to other packages: private names that are read, and methods replaced."""
