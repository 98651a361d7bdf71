"""nn.DataParallel: one process, one line changed, the first GPU does the rest.

python data_parallel.py DATA.safetensors LOSSES.json

Without a GPU nn.DataParallel calls the model directly; scatter, replicas and gather need GPUs.
"""

import torch
import torch.nn.functional as F
from shared import data, load_batch, make_lenet, write
from torch import nn

device_ids = list(range(torch.cuda.device_count()))
device = torch.device("cuda:0" if device_ids else "cpu")

model = nn.DataParallel(make_lenet().to(device), device_ids=device_ids or None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

losses = []
for batch in data["batches"]:
    images, labels = load_batch(batch, device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)  # all outputs gathered on the first GPU
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

write(losses, model.module)  # model.state_dict() has "module." keys
