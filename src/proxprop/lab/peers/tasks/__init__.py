"""The tasks, one file for each kind of data."""

from proxprop.lab.peers.task import Task
from proxprop.lab.peers.tasks import (
    adding,
    anisotropic,
    arithmetic,
    autoencoder,
    burgers,
    cifar10,
    convection,
    digits,
    gpt,
    image,
    poisson,
)

FILES = (
    digits,
    anisotropic,
    autoencoder,
    image,
    poisson,
    convection,
    burgers,
    adding,
    arithmetic,
    gpt,
    cifar10,
)
TASKS: dict[str, Task] = {task.name: task for file in FILES for task in file.TASKS}
"""Every task by its name."""
