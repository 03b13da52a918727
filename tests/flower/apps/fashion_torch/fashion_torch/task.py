"""fashion-torch: the model, the data and the loops; on the data that fleetbed ships."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from fleetbed.emulator.data import open_dataset, prepare_dataset
from fleetbed.profiles.experiment import Data
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Two convolutions and three linear layers, as in the first tutorial of PyTorch and in quickstart-pytorch."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


cache = {}


def images(part):
    """All images of a part as 3 x 32 x 32, loaded once in a process."""
    if part not in cache:
        data = open_dataset(prepare_dataset(Data()))
        count = len(data.y_train if part == "train" else data.y_test)
        x, y = data.batch(part, torch.arange(count).numpy(), None)
        cache[part] = F.pad(x, [2, 2, 2, 2]).expand(-1, 3, -1, -1), y
    return cache[part]


def load_data(partition, partitions, samples, batch):
    """A client's own training batches, of so many samples, and its test batches, of a quarter more."""
    x, y = images("train")
    mine = torch.arange(partition, len(y), partitions)[: samples * 5 // 4]
    trainset = TensorDataset(x[mine[:samples]], y[mine[:samples]])
    testset = TensorDataset(x[mine[samples:]], y[mine[samples:]])
    return DataLoader(trainset, batch_size=batch, shuffle=True), DataLoader(testset, batch_size=batch)


def train(net, loader, epochs, lr):
    """Train on the training set; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            running += loss.item()
    return running / (epochs * len(loader))


def test(net, loader):
    """Loss and accuracy on the test set."""
    net.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for x, y in loader:
            out = net(x)
            loss += F.cross_entropy(out, y).item()
            right += (out.argmax(1) == y).sum().item()
    return loss / len(loader), right / len(loader.dataset)
