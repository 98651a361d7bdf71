"""Tables: columns become numbers."""
