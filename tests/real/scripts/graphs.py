"""Classification of graphs, as in the notebook of PyTorch Geometric, with its loader."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.nn import Linear
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

OPTIONS: dict[str, Any] = {"max_epochs": 2}
STRATEGY = {"rng": "device"}  # it drops out


class GCN(torch.nn.Module):
    def __init__(self, hidden_channels: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(7, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, hidden_channels)
        self.conv3 = GCNConv(hidden_channels, hidden_channels)
        self.lin = Linear(hidden_channels, 2)

    def forward(self, x: Any, edge_index: Any, batch: Any) -> torch.Tensor:
        # 1. Obtain node embeddings
        x = self.conv1(x, edge_index)
        x = x.relu()
        x = self.conv2(x, edge_index)
        x = x.relu()
        x = self.conv3(x, edge_index)
        # 2. Readout layer
        x = global_mean_pool(x, batch)
        # 3. Apply a final classifier
        x = F.dropout(x, p=0.5, training=self.training)
        return self.lin(x)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GCN(hidden_channels=16)
        self.criterion = torch.nn.CrossEntropyLoss()

    def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
        out = self.model(data.x, data.edge_index, data.batch)
        loss = self.criterion(out, data.y)
        self.log("loss", loss, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data: Any, batch_idx: int) -> None:
        out = self.model(data.x, data.edge_index, data.batch)
        accuracy = (out.argmax(dim=1) == data.y).double().mean()
        self.log("accuracy", accuracy, batch_size=data.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def module() -> pl.LightningModule:
    return Classifier()


def loaders() -> tuple[Any, Any]:
    generator, graphs = torch.Generator().manual_seed(1), []
    for number in range(12):
        nodes = int(torch.randint(4, 9, (1,), generator=generator))
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
        x = torch.randn(nodes, 7, generator=generator, dtype=torch.float64)
        graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([number % 2])))
    return DataLoader(graphs, batch_size=4), DataLoader(graphs, batch_size=4)
