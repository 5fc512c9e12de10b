"""Attention and its gradients as formulas on [b, h, s, d] tensors; nothing here knows layouts, masks' names or dtypes.

The backward pass is written out with the saved statistics, as kernels do it, not derived by autograd: P = exp(S - L),
dS = P * (dP - D) with D = rowsum(dO * O). Key and value may have fewer heads than the query (GQA).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.engines.reference.masking import Mask


def unrounded(values: torch.Tensor) -> torch.Tensor:
    """Return the values as they are."""
    return values


@dataclass(frozen=True, slots=True)
class Softmax:
    """What enters the softmax besides q and k.

    ``bias`` broadcasts to [b, h, sq, skv] and is added to the scaled scores; ``offset`` [1, h, 1, 1] is one more
    logit in every row's sum that no value belongs to; ``dropout`` [b, h, sq, skv] is 0 or 1/(1-p). ``round_weights``
    and ``round_gradients`` are what is done to the probabilities, and to the gradients of the scores, before a product
    reads them.
    """

    scale: float
    mask: Mask
    bias: torch.Tensor | None
    offset: torch.Tensor | None
    dropout: torch.Tensor | None
    round_weights: Callable[[torch.Tensor], torch.Tensor] = unrounded
    round_gradients: Callable[[torch.Tensor], torch.Tensor] = unrounded


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors of a backward pass as the products along tokens read them, and the output's gradient unrounded.

    They differ from what the products along a head's dimension read where blocks have scales.
    """

    q: torch.Tensor
    k: torch.Tensor
    grad: torch.Tensor
    exact_grad: torch.Tensor

    def kept(self, mask: Mask) -> Copies:
        """Return the same with the padded tokens zeroed."""
        rows, columns = mask.rows, mask.columns
        return Copies(_keep(self.q, rows), _keep(self.k, columns), _keep(self.grad, rows), _keep(self.exact_grad, rows))


@dataclass(frozen=True, slots=True)
class Forward:
    """Output [b, h, sq, d_v], log-sum-exp [b, h, sq, 1] and the largest visible score of each head [h]."""

    output: torch.Tensor
    stats: torch.Tensor
    max_logit: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of q, k, v, of the scores (the bias's before it is reduced) and of the offset [1, h, 1, 1]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    offset: torch.Tensor | None


def _keep(tensor: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Zero the padded tokens: memory there may hold anything, NaN included, and 0 * NaN is NaN."""
    return tensor if valid is None else tensor.masked_fill(~valid, 0.0)


def _fold(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """View [b, h, s, n] as [b, groups, h / groups * s, n]: the heads that share a key head become its rows."""
    batch, heads, tokens, width = tensor.shape
    return tensor.reshape(batch, groups, heads // groups * tokens, width)


def _scores(q: torch.Tensor, k: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Return scaled, biased scores [b, h, sq, skv], -inf where a query does not see a key."""
    folded = _fold(q, k.shape[1]) @ k.transpose(2, 3)
    scores = folded.view(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).mul_(softmax.scale)
    if softmax.bias is not None:
        scores += softmax.bias
    return scores.masked_fill_(~softmax.mask.valid, -torch.inf)


def _probabilities(scores: torch.Tensor, stats: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - stats), zero where a query does not see a key whatever its row's statistics are."""
    blind = ~valid.any(dim=-1, keepdim=True)  # its statistics are -inf, or, in padding, whatever memory held
    return (scores - stats.masked_fill(blind, 0.0)).exp_()


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> Forward:
    """Compute attention.

    A row that sees no key has output zero; its log-sum-exp is -inf, or the offset where there is one.
    """
    mask = softmax.mask
    q, k, v = _keep(q, mask.rows), _keep(k, mask.columns), _keep(v, mask.columns)
    scores = _scores(q, k, softmax)
    stats = torch.logsumexp(scores, dim=-1, keepdim=True)
    if softmax.offset is not None:
        stats = torch.logaddexp(stats, softmax.offset)
    weights = softmax.round_weights(_probabilities(scores, stats, mask.valid))
    if softmax.dropout is not None:
        weights = weights * softmax.dropout
    output = (_fold(weights, k.shape[1]) @ v).view(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    return Forward(output, stats, scores.amax(dim=(0, 2, 3)))


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    grad: torch.Tensor,
    stats: torch.Tensor,
    softmax: Softmax,
    copies: Copies | None = None,
) -> Gradients:
    """Compute the gradients from the saved output [b, h, sq, d_v] and statistics [b, h, sq, 1].

    Padded tokens of the inputs, the output and its gradient do not enter, and their gradients are zero. ``copies``
    are read by the products along tokens; None means the same tensors.
    """
    mask, groups = softmax.mask, k.shape[1]
    q, k, v = _keep(q, mask.rows), _keep(k, mask.columns), _keep(v, mask.columns)
    output, grad = _keep(output, mask.rows), _keep(grad, mask.rows)
    copies = Copies(q, k, grad, grad) if copies is None else copies.kept(mask)
    weights = _probabilities(_scores(q, k, softmax), stats, mask.valid)
    dropped = softmax.round_weights(weights)
    if softmax.dropout is not None:
        dropped = dropped * softmax.dropout
    grad_v = _fold(dropped, groups).transpose(2, 3) @ _fold(copies.grad, groups)
    grad_weights = (_fold(grad, groups) @ v.transpose(2, 3)).view(weights.shape)
    if softmax.dropout is not None:
        grad_weights = grad_weights * softmax.dropout
    delta = (copies.exact_grad * output).sum(dim=-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta)
    rounded = softmax.round_gradients(grad_scores)
    grad_q = (_fold(rounded, groups) @ copies.k).view(q.shape) * softmax.scale
    grad_k = _fold(rounded, groups).transpose(2, 3) @ _fold(copies.q, groups) * softmax.scale
    grad_offset = None
    if softmax.offset is not None:
        share = _keep(torch.exp(softmax.offset - stats), mask.rows)  # the part of each row's sum that is the offset's
        grad_offset = -(share * delta).sum(dim=(0, 2), keepdim=True)
    return Gradients(grad_q, grad_k, grad_v, grad_scores, grad_offset)
