"""Records: one folder a run. It can be cut off or damaged at any moment, and reading notices.

config.json          the settings
environment.json     versions, device, commit, of every start
plan.json            what the library does with every layer
metrics.jsonl        what was measured; the same bytes on every rerun on CPU
timing.jsonl         training time, evaluation excluded
result.json          how it ended; present once the run is done
weights.safetensors  the final weights
checkpoint-*.ckpt    the last two checkpoints, until the run is done
"""

from proxprop.lab.records.read import Record, find, read
from proxprop.lab.records.run import Run

__all__ = ["Record", "Run", "find", "read"]
