class UseError(Exception):
    """A command or an option cannot do what was asked; the text says why and what to do next."""
