"""The workloads of Table 1 of µ-TWO at full size, and three more that many people train.

The paper gives parameters and batch sizes, not image sizes, sequence lengths or dropout: ``note`` says
what is taken here. Every entry has a small relative in ``registry.SMALL``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from .deep_vision import RESNET_101, MobileNetV3Large, ResNet
from .dense import mlp
from .huggingface import bert_base_mlm, bert_base_nsp, gpt2, vit
from .language import LSTMTranslation
from .paper_batches import (
    IMAGE_SIZE,
    TABLE_SIZES,
    TRANSLATION_VOCAB_SIZE,
    bert_mlm_batch,
    bert_nsp_batch,
    click_batch,
    gpt2_batch,
    image_batch,
    translation_batch,
    vector_batch,
)
from .recommend import JointDLRM
from .registry import Loss, joint_click_loss, own_loss, translation_loss
from .seeding import seeded
from .vision import PlainCNN


@dataclass(frozen=True)
class SizedWorkload:
    """One model to train at full size.

    ``batch_sizes`` are the two of Table 1; the first is the default. ``build(seed)`` makes the model in
    fp32 on the CPU, in training mode, always with the same weights for the same seed; it raises
    ``ImportError`` where a package is missing. ``batch(seed, batch_size)`` makes a tuple or dict of CPU
    tensors. ``loss(model, batch)`` gives a scalar. ``note`` says where this differs from Table 1, and
    what the table leaves open.
    """

    name: str
    batch_sizes: tuple[int, ...]
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, Any], Loss]
    batch: Callable[[int, int], Any]
    note: str


# Models of torchvision.


def torchvision_models(name: str) -> Any:
    """``torchvision.models``; raises ``ImportError`` naming the workload where it does not import."""
    try:
        return importlib.import_module("torchvision.models")
    # Built for another torch, torchvision fails with a RuntimeError: its operators are not there.
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"the workload {name!r} needs the package 'torchvision', which does not import here ({error}); "
            "install the version that belongs to your torch with: pip install torchvision"
        ) from error


def _convolutional(name: str) -> nn.Module:
    """torchvision's model of this name, without pretrained weights, or ours where it does not import."""
    try:
        models = torchvision_models(name)
    except ImportError:
        return MobileNetV3Large() if name == "mobilenet_v3_large" else ResNet(RESNET_101)
    return cast(nn.Module, getattr(models, name)(weights=None))


def _vision_transformer(name: str, hidden_size: int, num_layers: int, num_heads: int) -> nn.Module:
    """torchvision's ViT on 16×16 patches, or that of transformers where torchvision does not import."""
    try:
        models = torchvision_models(name)
    except ImportError:
        return vit(hidden_size, num_layers, num_heads)
    model = models.VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=16,
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_dim=hidden_size,
        mlp_dim=4 * hidden_size,
    )
    return cast(nn.Module, model)


# Losses.


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    inputs, labels = batch
    output = model(inputs)
    # Models of transformers give a record, all others the logits themselves.
    return F.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels)


def _next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    loss: Tensor = model(**batch, labels=batch["input_ids"]).loss
    return loss


# The registry, in the order of Table 1.

_EITHER = "torchvision's model, or that of transformers where torchvision does not import."
_OR_OURS = "torchvision's model, or the same written anew where torchvision does not import."
_IMAGES = "The table leaves the image size open: 224×224 here."
_BERT = "109.5M parameters, the published BERT-base, where the table has 100M."
_TEXT = (
    "The table leaves the sequence length open: 128 here. Every row is full, as packed text is, and there is "
    "no attention mask."
)
_NOT_IN_PAPER = "Not in the paper:"


def _language(dropout: float, suffix: str, said: str) -> list[SizedWorkload]:
    masked = "The table has next sentence prediction alone; this is masked language modelling."
    gpt2_note = "124.4M parameters, as in the table. The table leaves the sequence length open: 512 here."

    def bert(task: str, build: Any, batch: Any, note: str) -> SizedWorkload:
        name = f"bert_base_{task}{suffix}"
        return SizedWorkload(
            name, (16, 24), seeded(build, dropout=dropout), own_loss, batch, f"{note} {said}"
        )

    gpt2_model, note = seeded(gpt2, dropout=dropout), f"{gpt2_note} {said}"
    return [
        bert("mlm", bert_base_mlm, bert_mlm_batch, f"{_BERT} {masked} {_TEXT}"),
        bert("nsp", bert_base_nsp, bert_nsp_batch, f"{_BERT} {_TEXT}"),
        SizedWorkload(f"gpt2{suffix}", (8, 16), gpt2_model, _next_token_loss, gpt2_batch, note),
    ]


def _image_model(name: str, sizes: tuple[int, int], note: str, **vit_sizes: int) -> SizedWorkload:
    build = seeded(_vision_transformer if vit_sizes else _convolutional, name=name, **vit_sizes)
    return SizedWorkload(name, sizes, build, classification_loss, image_batch, note)


_WORKLOADS = [
    _image_model(
        *("vit_b16", (8, 16)),
        f"86.6M parameters, the published ViT-B/16, where the table has 60M. {_IMAGES} No dropout. {_EITHER}",
        hidden_size=768,
        num_layers=12,
        num_heads=12,
    ),
    _image_model(
        *("vit_60m", (8, 16)),
        "60.3M parameters, as in the table, which gives neither depth nor width: here ViT-B/16 narrowed to "
        f"width 640 with 10 heads of 64, 12 layers as before. {_IMAGES} No dropout. {_EITHER}",
        hidden_size=640,
        num_layers=12,
        num_heads=10,
    ),
    _image_model(
        *("mobilenet_v3_large", (64, 128)),
        f"5.5M parameters; the table has 5.4M. {_IMAGES} The published dropout of 0.2 before the last "
        f"layer stays. {_OR_OURS}",
    ),
    _image_model("resnet101", (48, 64), f"44.5M parameters, as in the table. {_IMAGES} {_OR_OURS}"),
    *_language(0.1, "", "Dropout 0.1, the library's default."),
    *_language(0.0, "_no_dropout", "No dropout."),
    SizedWorkload(
        *("dlrm", (512, 1024), seeded(JointDLRM, num_categories=TABLE_SIZES), joint_click_loss, click_batch),
        "40.2M parameters; the table has 40M and does not say how large the embedding tables are: here those "
        "of Criteo's click logs, none above 24,000 rows. NVIDIA's layers and joint table in plain torch, "
        "with a dense gradient of the table.",
    ),
    SizedWorkload(
        *("lstm_translation", (64, 128)),
        seeded(LSTMTranslation, vocab_size=TRANSLATION_VOCAB_SIZE, hidden_size=512, num_layers=2),
        *(translation_loss, translation_batch),
        f"{_NOT_IN_PAPER} two LSTMs of two layers with attention, 21.2M parameters, 32 tokens on either side "
        "without padding, no dropout.",
    ),
    SizedWorkload(
        *("small_cnn", (64, 128), seeded(PlainCNN), classification_loss),
        partial(image_batch, image_size=32, num_classes=10),
        f"{_NOT_IN_PAPER} four convolutions on 32×32 images, 0.1M parameters.",
    ),
    SizedWorkload(
        *("mlp", (128, 256)),
        seeded(mlp, in_features=784, hidden_features=256, out_features=10, num_hidden=2),
        classification_loss,
        partial(vector_batch, num_features=784, num_classes=10),
        f"{_NOT_IN_PAPER} 784-256-256-10, 0.3M parameters.",
    ),
]
FULL_SIZE: dict[str, SizedWorkload] = {workload.name: workload for workload in _WORKLOADS}
"""All full-size workloads by name."""
