"""The one exception of the command line."""


class CommandError(Exception):
    """A wish of the user that a command cannot meet; the message says what was expected, what came and what to do."""
