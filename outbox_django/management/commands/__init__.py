"""Django finds the commands below by this path."""
