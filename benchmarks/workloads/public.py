"""Public architectures of transformers, timm and torchvision: no pretrained weights, small inputs.

Models of transformers get small sizes. Whatever draws random numbers while training is switched off, so that
results can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE = 2
NUM_CLASSES = 10
VOCABULARY = 256
NUM_TOKENS = 16
NUM_SAMPLES = 4000
"""Of a sound wave: a quarter of a second."""

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Architecture:
    """One model: a name ``library:model``, a family for tables, and how model, loss and batch are made."""

    name: str
    family: str
    build: Callable[[], tuple[nn.Module, Loss, Any]]


# ---- transformers ----------------------------------------------------------------------------------------

_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("projection_dim", "projection_size"), 16),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
}
"""Small sizes; a configuration takes those that it has as whole numbers."""
_FIRST_TOKENS = {
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("sep_token_id", "mask_token_id"), 2),
}
_OFF = ("dropout", "_pdrop", "layerdrop", "drop_path", "mask_time_prob", "mask_feature_prob", "jitter")
"""Parts of names of probabilities that are set to zero."""
_LATENT = {  # attention with compressed keys and values
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16},
    "beit": {"out_indices": [1, 2]},
    "codegen": {"rotary_dim": 4},
    "cvt": {"depth": [1, 2, 3]},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4},
    "efficientnet": {"hidden_dim": 1280, "width_coefficient": 1.0, "depth_coefficient": 1.0},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 2},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1, 1]},
    "glpn": {"image_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "embedding_size": 32},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "prophetnet": {"num_hidden_layers": None},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "attention_head_size": 8},
    "squeezebert": {"embedding_size": 32},
    "swin": {"window_size": 2},
    "xlnet": {"max_position_embeddings": None},
    **{
        name: {"decoder_start_token_id": 0} for name in ("longt5", "switch_transformers", "t5", "mt5", "umt5")
    },
}
"""Fields that a configuration needs besides; ``None`` keeps the library's own value."""


def _shrunk(kind: type[Any], **own: Any) -> Any:
    """A small configuration without random draws."""
    usual = kind()
    fields: dict[str, Any] = {"use_cache": False, "num_labels": NUM_CLASSES, "apply_spec_augment": False}
    in_stages = hasattr(usual, "depths") or hasattr(usual, "hidden_sizes")
    for name, size in _SIZES.items():
        if type(getattr(usual, name, None)) is int and not (in_stages and name != "vocab_size"):
            fields[name] = size
    for name, number in _FIRST_TOKENS.items():
        if getattr(usual, name, None) is not None:
            fields[name] = number
    for name, value in vars(usual).items():
        if hasattr(value, "model_type"):
            fields[name] = _shrunk(type(value))
        elif any(part in name for part in _OFF) and isinstance(value, float | list):
            fields[name] = [0.0] * len(value) if isinstance(value, list) else 0.0
        elif name == "depths":
            fields[name] = [1] * len(value)
    if in_stages and type(getattr(usual, "image_size", None)) is int:
        fields["image_size"] = 64
    fields |= own
    return kind(**{name: value for name, value in fields.items() if value is not None})


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH_SIZE, NUM_TOKENS))


def _labels() -> Tensor:
    return torch.randint(NUM_CLASSES, (BATCH_SIZE,))


def _pixels(config: Any) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(BATCH_SIZE, getattr(vision, "num_channels", 3), height, width)


def _text(config: Any) -> dict[str, Tensor]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _pair(config: Any) -> dict[str, Tensor]:
    whole = torch.ones(BATCH_SIZE, NUM_TOKENS, dtype=torch.long)
    return {"input_ids": _tokens(), "attention_mask": whole, "labels": _tokens()}


def _image(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": _pixels(config), "labels": _labels()}


def _image_alone(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": _pixels(config)}


def _image_and_noise(config: Any) -> dict[str, Tensor]:
    """The patches that a masked autoencoder hides are those of the largest noise."""
    num_patches = (config.image_size // config.patch_size) ** 2
    return {"pixel_values": _pixels(config), "noise": torch.rand(BATCH_SIZE, num_patches)}


def _image_and_text(config: Any) -> dict[str, Tensor]:
    whole = torch.ones(BATCH_SIZE, NUM_TOKENS, dtype=torch.long)
    return {"input_ids": _tokens(), "attention_mask": whole, "pixel_values": _pixels(config)}


def _wave(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH_SIZE, NUM_SAMPLES), "labels": _labels()}


def _spectrum(config: Any) -> dict[str, Tensor]:
    length = getattr(config, "max_length", 128)
    return {"input_values": torch.randn(BATCH_SIZE, length, config.num_mel_bins), "labels": _labels()}


def _spectrum_and_text(config: Any) -> dict[str, Tensor]:
    shape = (BATCH_SIZE, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": torch.randn(shape), "labels": _tokens()}


def _frames_and_text(config: Any) -> dict[str, Tensor]:
    shape = (BATCH_SIZE, 32, config.input_feat_per_channel)
    return {"input_features": torch.randn(shape), "labels": _tokens()}


@dataclass(frozen=True)
class _Task:
    """A family: the class that ``transformers`` makes its models with, their batch, and their names."""

    family: str
    auto: str
    batch: Callable[[Any], dict[str, Tensor]]
    models: str


_TASKS = (
    _Task(
        "text, causal",
        "AutoModelForCausalLM",
        _text,
        "apertus arcee bert-generation biogpt bitnet bloom codegen cohere cohere2 ctrl diffllama ernie4_5 "
        "exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox "
        "gpt_neox_japanese gptj granite helium llama mistral modernbert-decoder mpt nanochat nemotron olmo "
        "olmo2 olmo3 openai-gpt opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2 "
        "vaultgemma xglm xlnet",
    ),
    _Task(
        "mixture of experts",
        "AutoModelForCausalLM",
        _text,
        "afmoe deepseek_v2 deepseek_v3 doge ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe "
        "granitemoeshared jetmoe llama4_text mixtral olmoe phimoe qwen2_moe qwen3_moe",
    ),
    _Task(
        "state space and recurrent",
        "AutoModelForCausalLM",
        _text,
        "bamba falcon_h1 falcon_mamba jamba lfm2 mamba mamba2 minimax qwen3_next recurrent_gemma rwkv xlstm",
    ),
    _Task(
        "text, masked",
        "AutoModelForMaskedLM",
        _text,
        "albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie "
        "esm eurobert flaubert fnet funnel ibert layoutlm longformer megatron-bert mobilebert modernbert "
        "mpnet mra nystromformer reformer rembert roberta roberta-prelayernorm roc_bert roformer "
        "squeezebert tapas xlm xlm-roberta xlm-roberta-xl yoso",
    ),
    _Task(
        "text, encoder and decoder",
        "AutoModelForSeq2SeqLM",
        _pair,
        "bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp "
        "nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5",
    ),
    _Task(
        "images",
        "AutoModelForImageClassification",
        _image,
        "beit bit convnext convnextv2 cvt data2vec-vision dinov2 dinov2_with_registers efficientnet "
        "focalnet hiera ijepa mobilenet_v1 mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet resnet "
        "segformer siglip swiftformer swin swinv2 textnet vit vit_msn",
    ),
    _Task("dense images", "AutoModelForDepthEstimation", _image_alone, "dpt glpn"),
    _Task("dense images", "AutoModel", _image_alone, "vitdet yolos sam_vision_model"),
    _Task("dense images", "AutoModel", _image_and_noise, "vit_mae"),
    _Task("images and text", "AutoModel", _image_and_text, "altclip blip chinese_clip clip clipseg"),
    _Task(
        "sound",
        "AutoModelForAudioClassification",
        _wave,
        "data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm",
    ),
    _Task("sound", "AutoModelForAudioClassification", _spectrum, "audio-spectrogram-transformer"),
    _Task("sound", "AutoModelForSpeechSeq2Seq", _spectrum_and_text, "whisper"),
    _Task("sound", "AutoModelForSpeechSeq2Seq", _frames_and_text, "speech_to_text"),
)


def _transformer(task: _Task, name: str) -> tuple[nn.Module, Loss, Any]:
    import transformers

    config = _shrunk(transformers.CONFIG_MAPPING[name], **_OWN.get(name, {}))
    model = getattr(transformers, task.auto).from_config(config)
    return model, _loss_of_output, task.batch(config)


def _loss_of_output(model: Any, batch: Mapping[str, Tensor]) -> Any:
    """The model's own loss, or the mean squares of what it returns."""
    output = model(**batch)
    if getattr(output, "loss", None) is not None:
        return output.loss
    found = [value for value in output.to_tuple() if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.stack([value.square().mean() for value in found]).sum()


# ---- timm and torchvision --------------------------------------------------------------------------------

_SIDE = 128
_TIMM = (
    "beit_base_patch16_224 cait_xxs24_224 coat_tiny coatnet_nano_rw_224 convit_tiny convmixer_768_32 "
    "convnext_atto convnextv2_atto crossvit_tiny_240 cspresnet50 davit_tiny deit3_small_patch16_224 "
    "densenet121 dla34 dm_nfnet_f0 dpn68 eca_nfnet_l0 edgenext_xx_small efficientformer_l1 "
    "efficientformerv2_s0 efficientnet_b0 efficientvit_b0 eva02_tiny_patch14_224 fastvit_t8 fbnetc_100 "
    "focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnet_100 gmixer_24_224 gmlp_s16_224 hardcorenas_a "
    "hgnet_tiny hrnet_w18_small inception_next_tiny lambda_resnet26t lcnet_050 levit_128s "
    "maxvit_rmlp_pico_rw_256 mambaout_femto mixer_s32_224 mixnet_s mnasnet_100 mobilenetv3_small_100 "
    "mobilenetv4_conv_small "
    "mobileone_s0 mobilevit_xxs mobilevitv2_050 mvitv2_tiny nest_tiny nf_resnet50 pit_ti_224 "
    "poolformer_s12 pvt_v2_b0 regnety_002 repvgg_a0 repvit_m0_9 res2net50_26w_4s resmlp_12_224 resnest14d "
    "resnet26 resnetv2_50 rexnet_100 selecsls42b sequencer2d_s seresnet18 shvit_s1 skresnet18 "
    "starnet_s1 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 tf_efficientnetv2_b0 tiny_vit_5m_224 "
    "tinynet_e tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11_bn visformer_tiny "
    "vit_tiny_patch16_224 volo_d1_224 vovnet39a xception41 xcit_nano_12_p16_224"
)
_TORCHVISION = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t "
    "mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50 "
    "resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11 vgg11_bn vit_b_32 "
    "wide_resnet50_2"
)
_TORCHVISION_DENSE = "fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large"
_TORCHVISION_VIDEO = "mc3_18 mvit_v2_s r2plus1d_18 r3d_18 s3d swin3d_t"
_FIXED = {"inception_v3": 160, "maxvit_t": 224, "swin_t": 64, "vit_b_32": 224}


def _timm(name: str) -> tuple[nn.Module, Loss, Any]:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=NUM_CLASSES)
    side = model.pretrained_cfg["input_size"][-1]
    if not model.pretrained_cfg.get("fixed_input_size"):
        side = min(side, _SIDE)
    return _without_dropout(model), _classify, (torch.randn(BATCH_SIZE, 3, side, side), _labels())


def _torchvision(name: str) -> tuple[nn.Module, Loss, Any]:
    import torchvision

    own = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES, **own)
    side = _FIXED.get(name, _SIDE)
    return _without_dropout(model), _classify, (torch.randn(BATCH_SIZE, 3, side, side), _labels())


def _torchvision_dense(name: str) -> tuple[nn.Module, Loss, Any]:
    import torchvision

    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=NUM_CLASSES)
    batch = torch.randn(BATCH_SIZE, 3, 64, 64), torch.randint(NUM_CLASSES, (BATCH_SIZE, 64, 64))
    return (
        _without_dropout(model),
        lambda model, batch: F.cross_entropy(model(batch[0])["out"], batch[1]),
        batch,
    )


def _torchvision_video(name: str) -> tuple[nn.Module, Loss, Any]:
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES)
    length, side = (16, 224) if name in ("mvit_v2_s", "s3d") else (16, 64)
    return _without_dropout(model), _classify, (torch.randn(BATCH_SIZE, 3, length, side, side), _labels())


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores = model(batch[0])
    if isinstance(scores, tuple | list):  # a distilled model's two heads
        scores = torch.stack(list(scores)).mean(0)
    return F.cross_entropy(scores, batch[1])


def _without_dropout(model: nn.Module) -> nn.Module:
    """Set the probabilities of dropout, of paths and of blocks to zero."""
    for module in model.modules():
        for name in ("p", "drop_prob", "stochastic_depth_prob", "attn_drop", "attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


# ---- all of them -----------------------------------------------------------------------------------------


def _of_task(task: _Task) -> list[Architecture]:
    return [
        Architecture(f"transformers:{name}", task.family, partial(_transformer, task, name))
        for name in task.models.split()
    ]


def _of(library: str, family: str, build: Callable[[str], Any], names: str) -> list[Architecture]:
    return [Architecture(f"{library}:{name}", family, partial(build, name)) for name in names.split()]


ARCHITECTURES: tuple[Architecture, ...] = (
    *(architecture for task in _TASKS for architecture in _of_task(task)),
    *_of("timm", "images (timm)", _timm, _TIMM),
    *_of("torchvision", "images (torchvision)", _torchvision, _TORCHVISION),
    *_of("torchvision", "dense images", _torchvision_dense, _TORCHVISION_DENSE),
    *_of("torchvision", "video", _torchvision_video, _TORCHVISION_VIDEO),
)

Remedied = tuple[str, Callable[[], tuple[nn.Module, Loss, Any]]]


def _with_batch(name: str, **own: Tensor) -> tuple[nn.Module, Loss, Any]:
    model, loss, batch = _named(name).build()
    return model, loss, {**batch, **own}


def _with_batched_experts(name: str) -> tuple[nn.Module, Loss, Any]:
    model, loss, batch = _named(name).build()
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("batched_mm")
    return model, loss, batch


def _without_mask(name: str) -> tuple[nn.Module, Loss, Any]:
    model, loss, batch = _named(name).build()
    del batch["attention_mask"]
    return model, loss, batch


def _without_ranges(name: str) -> tuple[nn.Module, Loss, Any]:
    """Ranges of activations are collected by modules in training mode, which read them to find the first."""
    model, loss, batch = _named(name).build()
    for module in model.train().modules():
        if type(module).__name__ == "QuantAct":
            module.eval()
    return model, loss, batch


def _with_fixed_seeds(name: str) -> tuple[nn.Module, Loss, Any]:
    """A layer keeps a new seed in every call, to repeat its dropout in the backward pass."""
    model, loss, batch = _named(name).build()
    for module in model.modules():
        if type(module).__name__ == "ReformerLayer":
            layer: Any = module
            layer.attention_seed = layer.feed_forward_seed = 0
            layer._init_attention_seed = layer._init_feed_forward_seed = _do_nothing
    return model, loss, batch


def _do_nothing() -> None:
    pass


def _with_experts_in_fixed_shapes(name: str) -> tuple[nn.Module, Loss, Any]:
    """A row for each token and each expert that it chose; the model's own code splits rows by expert."""
    model, loss, batch = _named(name).build()
    for module in model.modules():
        part: Any = module
        if type(module).__name__ == "JetMoeTopKGating":
            part.forward = partial(_route, module)
        elif type(module).__name__ == "JetMoeParallelExperts":
            part.forward = partial(_multiply, module)
    return model, loss, batch


def _route(router: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """Rows, the token, gate and expert of each, and the router's logits."""
    logits = router.layer(tokens).float()
    largest, experts = logits.topk(router.top_k, dim=1)
    rows = torch.arange(experts.numel(), device=tokens.device)
    gates = torch.softmax(largest, dim=1).type_as(tokens)
    return rows, rows // router.top_k, gates.flatten(), experts.flatten(), logits


def _multiply(experts: Any, rows: Tensor, expert: Tensor) -> Tensor:
    return torch.bmm(experts.weight[expert], rows.unsqueeze(-1)).squeeze(-1)


def _with_smaller_images(name: str, side: int) -> tuple[nn.Module, Loss, Any]:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=NUM_CLASSES, img_size=side)
    return _without_dropout(model), _classify, (torch.randn(BATCH_SIZE, 3, side, side), _labels())


def _named(name: str) -> Architecture:
    return next(each for each in ARCHITECTURES if each.name == name)


def _remedies() -> dict[str, Remedied]:
    whole = torch.ones(BATCH_SIZE, NUM_TOKENS, dtype=torch.long)
    fsmt, prophetnet = "transformers:fsmt", "transformers:prophetnet"
    led, ibert = "transformers:led", "transformers:ibert"
    reformer, jetmoe = "transformers:reformer", "transformers:jetmoe"
    switch = "model.set_experts_implementation('batched_mm')"
    return {
        **{
            each.name: (switch, partial(_with_batched_experts, each.name))
            for each in ARCHITECTURES
            if each.family in ("mixture of experts", "state space and recurrent")
        },
        jetmoe: ("experts in fixed shapes", partial(_with_experts_in_fixed_shapes, jetmoe)),
        led: ("leave out attention_mask", partial(_without_mask, led)),
        ibert: ("module.eval() of each QuantAct", partial(_without_ranges, ibert)),
        reformer: ("fixed seeds", partial(_with_fixed_seeds, reformer)),
        fsmt: ("pass decoder_attention_mask", partial(_with_batch, fsmt, decoder_attention_mask=whole)),
        "timm:sequencer2d_s": ("images of 56 pixels", partial(_with_smaller_images, "sequencer2d_s", 56)),
        prophetnet: ("pass decoder_input_ids", partial(_with_batch, prophetnet, decoder_input_ids=whole)),
    }


REMEDIES = _remedies()
"""What to change where a model is refused as it is, and the model with that change."""
