"""Count the calls of torch that a function makes, as a profiler sees them; a dispatch mode would change what is called."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def torch_calls(function: Callable[[], object]) -> int:
    """Calls of operators, but not those that an operator makes itself."""
    function()  # what is made once is not counted
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    operators = [event for event in seen.events() if event.name.startswith("aten::")]
    return sum(event.cpu_parent not in operators for event in operators)
