"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """A mistake in the user's input. Entry scripts print its text and exit with code 2, without a traceback.

    The text says what is wrong and what to do about it, with the command that mends it where there is one.
    """
