"""The lab: train with and without proximal steps, compare, reproduce the paper, look at the result.

Training needs torch, numpy and safetensors only; rich, typer, matplotlib and scikit-learn are imported where
they are used, so that a bare GPU machine can run experiments and another machine can draw them.

    from proxprop.lab import Config, train
    record = train(Config(data="cifar10", solver="cg:3"), "runs/first")
"""

from proxprop.lab.config import Config
from proxprop.lab.refusal import Interrupted, Refused
from proxprop.lab.train import train

__all__ = ["Config", "Interrupted", "Refused", "train"]
