"""The tasks, one file for each kind of data."""

from proxprop.lab.peers.task import Task
from proxprop.lab.peers.tasks import (
    anisotropic,
    autoencoder,
    cifar10,
    convection,
    digits,
    gpt,
    image,
    poisson,
)

FILES = (digits, anisotropic, autoencoder, image, poisson, convection, gpt, cifar10)
TASKS: dict[str, Task] = {task.name: task for file in FILES for task in file.TASKS}
"""Every task by its name."""
