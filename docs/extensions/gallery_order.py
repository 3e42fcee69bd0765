"""The order of the gallery: from a first network to extending the library. What is not named here comes last."""

from pathlib import Path

ORDER = (
    "first_mlp",
    "step_sizes",
    "diagnostics",
    "image",
    "autoencoder",
    "pinn",
    "accumulation_ddp",
    "register",
    "custom_solver",
)


class Place:
    """A key to sort scripts by, as sphinx-gallery asks for it."""

    def __init__(self, folder: str) -> None:
        pass

    def __call__(self, script: str) -> tuple[int, str]:
        """Where a script stands, then its name."""
        name = Path(script).stem.removeprefix("plot_")
        return (ORDER.index(name) if name in ORDER else len(ORDER), name)
