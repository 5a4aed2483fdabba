"""From scans as the scanner gives them to scans that a network can be trained on."""
