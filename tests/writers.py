"""Replacements of Megatron's TensorBoard and W&B writers that store their input."""


class Board:
    """Like ``SummaryWriter``: ``scalars`` are ``(tag, value, step)``."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))


class Wandb:
    """Like W&B's module: ``logged`` are ``({tag: value}, step)``."""

    def __init__(self):
        self.logged = []

    def log(self, figures, step):
        self.logged.append((figures, step))
