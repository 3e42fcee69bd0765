"""ProxProp inside other people's training loops. Each module needs its library, and only that one:

- `proxprop.integrations.huggingface`: a callback for the Trainer of `transformers`;
- `proxprop.integrations.lightning`: a callback for Lightning's Trainer.

Loops that you write yourself, with Accelerate or without, need no integration: see `proxprop.wrap`.
"""
