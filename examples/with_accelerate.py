"""ProxProp with Accelerate: one line to wrap, one to solve before clipping, one for checkpoints.

accelerate launch examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import proxprop

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x, teacher = torch.randn(2048, 64) * torch.logspace(0, -1.5, 64), nn.Linear(64, 10)
data = DataLoader(TensorDataset(x, teacher(x).argmax(dim=1)), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
attached = proxprop.wrap(optimizer, model)  # the first line
accelerator.register_for_checkpointing(attached)  # the second: for save_state and load_state

for epoch in range(3):
    for inputs, labels in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                attached.solve()  # the third: clip the direction, not the gradient
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss:.3f}")
accelerator.save_state("out/accelerate")
