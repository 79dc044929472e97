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


def _torchvision_models(name: str) -> Any:
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
        models = _torchvision_models(name)
    except ImportError:
        return MobileNetV3Large() if name == "mobilenet_v3_large" else ResNet(RESNET_101)
    return cast(nn.Module, getattr(models, name)(weights=None))


def _vision_transformer(name: str, hidden_size: int, num_layers: int, num_heads: int) -> nn.Module:
    """torchvision's ViT on 16×16 patches, or that of transformers where torchvision does not import."""
    try:
        models = _torchvision_models(name)
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


def _classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    inputs, labels = batch
    output = model(inputs)
    # Models of transformers give a record, all others the logits themselves.
    return F.cross_entropy(output if isinstance(output, Tensor) else output.logits, labels)


def _next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    loss: Tensor = model(**batch, labels=batch["input_ids"]).loss
    return loss


# The registry, in the order of Table 1.


def _vision() -> list[SizedWorkload]:
    either = "torchvision's model, or that of transformers where torchvision does not import."
    or_ours = "torchvision's model, or the same written anew where torchvision does not import."
    open_size = "The table leaves the image size open: 224×224 here."
    return [
        SizedWorkload(
            "vit_b16",
            (8, 16),
            seeded(_vision_transformer, name="vit_b16", hidden_size=768, num_layers=12, num_heads=12),
            _classification_loss,
            image_batch,
            f"86.6M parameters, the published ViT-B/16, where the table has 60M. {open_size} "
            f"No dropout. {either}",
        ),
        SizedWorkload(
            "vit_60m",
            (8, 16),
            seeded(_vision_transformer, name="vit_60m", hidden_size=640, num_layers=12, num_heads=10),
            _classification_loss,
            image_batch,
            "60.3M parameters, as in the table, which gives neither depth nor width: here ViT-B/16 narrowed "
            f"to width 640 with 10 heads of 64, 12 layers as before. {open_size} No dropout. {either}",
        ),
        SizedWorkload(
            "mobilenet_v3_large",
            (64, 128),
            seeded(_convolutional, name="mobilenet_v3_large"),
            _classification_loss,
            image_batch,
            f"5.5M parameters; the table has 5.4M. {open_size} The published dropout of 0.2 before the "
            f"last layer stays. {or_ours}",
        ),
        SizedWorkload(
            "resnet101",
            (48, 64),
            seeded(_convolutional, name="resnet101"),
            _classification_loss,
            image_batch,
            f"44.5M parameters, as in the table. {open_size} {or_ours}",
        ),
    ]


def _language() -> list[SizedWorkload]:
    bert_size = "109.5M parameters, the published BERT-base, where the table has 100M."
    bert_data = (
        "The table leaves the sequence length open: 128 here. Every row is full, as packed text is, and "
        "there is no attention mask."
    )
    gpt2_data = "The table leaves the sequence length open: 512 here."
    masked = "The table has next sentence prediction alone; this is masked language modelling."
    workloads = []
    for dropout, suffix, said in (
        (0.1, "", "Dropout 0.1, the library's default."),
        (0.0, "_no_dropout", "No dropout."),
    ):
        workloads += [
            SizedWorkload(
                f"bert_base_mlm{suffix}",
                (16, 24),
                seeded(bert_base_mlm, dropout=dropout),
                own_loss,
                bert_mlm_batch,
                f"{bert_size} {masked} {bert_data} {said}",
            ),
            SizedWorkload(
                f"bert_base_nsp{suffix}",
                (16, 24),
                seeded(bert_base_nsp, dropout=dropout),
                own_loss,
                bert_nsp_batch,
                f"{bert_size} {bert_data} {said}",
            ),
            SizedWorkload(
                f"gpt2{suffix}",
                (8, 16),
                seeded(gpt2, dropout=dropout),
                _next_token_loss,
                gpt2_batch,
                f"124.4M parameters, as in the table. {gpt2_data} {said}",
            ),
        ]
    return workloads


def _recommendation() -> list[SizedWorkload]:
    return [
        SizedWorkload(
            "dlrm",
            (512, 1024),
            seeded(JointDLRM, num_categories=TABLE_SIZES),
            joint_click_loss,
            click_batch,
            "40.2M parameters; the table has 40M and does not say how large the embedding tables are: here "
            "those of Criteo's click logs, none above 24,000 rows. NVIDIA's layers and joint table in plain "
            "torch, with a dense gradient of the table.",
        )
    ]


def _beyond_the_paper() -> list[SizedWorkload]:
    return [
        SizedWorkload(
            "lstm_translation",
            (64, 128),
            seeded(LSTMTranslation, vocab_size=TRANSLATION_VOCAB_SIZE, hidden_size=512, num_layers=2),
            translation_loss,
            translation_batch,
            "Not in the paper: two LSTMs of two layers with attention, 21.2M parameters, 32 tokens on either "
            "side without padding, no dropout.",
        ),
        SizedWorkload(
            "small_cnn",
            (64, 128),
            seeded(PlainCNN),
            _classification_loss,
            partial(image_batch, image_size=32, num_classes=10),
            "Not in the paper: four convolutions on 32×32 images, 0.1M parameters.",
        ),
        SizedWorkload(
            "mlp",
            (128, 256),
            seeded(mlp, in_features=784, hidden_features=256, out_features=10, num_hidden=2),
            _classification_loss,
            partial(vector_batch, num_features=784, num_classes=10),
            "Not in the paper: 784-256-256-10, 0.3M parameters.",
        ),
    ]


FULL_SIZE: dict[str, SizedWorkload] = {
    workload.name: workload
    for workload in (*_vision(), *_language(), *_recommendation(), *_beyond_the_paper())
}
"""All full-size workloads by name."""
