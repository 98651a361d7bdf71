"""What more than one wing needs to read files."""
