"""A run that ends in the midst."""

from fedsieve.observer import Observer


class Interrupt(Observer):
    """Ends a run after some rounds, as Ctrl-C would."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def round(self, line: dict) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
