"""What a person asks beforehand: clusters, shapes, performance model, machine, commands."""
