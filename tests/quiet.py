"""Warnings of torch's own that the code under test has no part in, as marks that let them pass."""

import pytest

# torch's own: dynamo makes an instance of every autograd.Function
quiet_dynamo = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")


# torch's own: its exporter asks for leaves of a tree in a way it has deprecated itself
quiet_exporter = pytest.mark.filterwarnings(
    r"ignore:.isinstance\(treespec, LeafSpec\). is deprecated:FutureWarning"
)


# torch's own: the whole of torch.ao.quantization is announced to leave
quiet_observers = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")


# torch's own: it calls these layouts beta and prototype
quiet_layouts = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


quiet_same_padding = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
