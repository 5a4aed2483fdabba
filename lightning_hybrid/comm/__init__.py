"""Who can speak to whom: process groups, channels for commands, links for tensors."""
