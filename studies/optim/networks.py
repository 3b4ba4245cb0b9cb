"""The two networks of the study: a small vision transformer and a small causal language model."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Trunk(nn.Module):
    """Blocks after a learned position, residual outputs scaled down by depth."""

    def __init__(self, width: int, heads: int, depth: int, length: int, causal: bool) -> None:
        super().__init__()
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.position.weight, std=0.02)
        for block in self.blocks:
            for layer in (block.out, block.down):
                layer.weight.data /= (2 * depth) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class ViT(nn.Module):
    """Images [B, 28, 28] or [B, channels, S, S] -> logits [B, 10], square patches."""

    def __init__(
        self,
        width: int = 64,
        heads: int = 4,
        depth: int = 4,
        *,
        size: int = 28,
        patch: int = 7,
        channels: int = 1,
    ) -> None:
        super().__init__()
        self.side = patch
        self.patch = nn.Linear(channels * patch**2, width, bias=False)
        self.trunk = Trunk(width, heads, depth, (size // patch) ** 2, causal=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        side = self.side
        images = images if images.dim() == 4 else images.unsqueeze(1)  # [B, C, S, S]
        cut = images.unfold(2, side, side).unfold(3, side, side)  # [B, C, n, n, P, P]
        patches = cut.movedim(1, 3).flatten(1, 2).flatten(-3)  # [B, n n, C P P]
        return self.head(self.trunk(self.patch(patches)).mean(1))


class LanguageModel(nn.Module):
    """Bytes [B, T] -> logits [B, T, V]; about one million parameters."""

    def __init__(
        self, vocabulary: int, length: int, width: int = 144, heads: int = 4, depth: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.trunk = Trunk(width, heads, depth, length, causal=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(self.embed(tokens)))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all positions."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
