"""Models of other packages: graphs, medicine, segmentation, speech, vision and language, physics, tables.

    pip install --no-deps torch_geometric monai segmentation-models-pytorch open_clip_torch ftfy x-transformers \
        vit-pytorch performer-pytorch local-attention conformer e3nn opt_einsum opt_einsum_fx pytorch-tabnet \
        neuraloperator tensorly tensorly-torch mambapy einops einx torch-einops-utils hyper-connections loguru \
        perceiver-pytorch linformer nystrom-attention denoising-diffusion-pytorch ema-pytorch egnn-pytorch \
        vector-quantize-pytorch kornia kornia_rs pytorch-tcn efficientnet-pytorch g-mlp-pytorch gateloop-transformer

Besides these: aiohttp, xxhash, frozendict, axial-positional-embedding and product-key-memory, without dependencies too.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.models import Build, Subject, drawn

BATCH = 2
NODES, EDGES = 24, 72
WORDS = 60

Input = tuple[int, ...] | Callable[[torch.Generator], Any]


def _words(*shape: int) -> Input:
    return lambda generator: torch.randint(0, WORDS, shape, generator=generator)


def _edges(generator: torch.Generator) -> torch.Tensor:
    """As many edges in each step, some of them from a node to itself."""
    return torch.randint(0, NODES, (2, EDGES), generator=generator)


def _belongs(_: torch.Generator) -> torch.Tensor:
    return torch.arange(NODES) // (NODES // 2)


def _times(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 900, (BATCH,), generator=generator)


def _of(path: str, *arguments: Any, **keywords: Any) -> partial[Any]:
    """What makes a model: a class or function by its path, and its arguments, which may be made in the same way."""
    return partial(_made, path, arguments, keywords)


def _made(path: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    def made(value: Any) -> Any:
        return value() if isinstance(value, partial) else value

    given = [made(value) for value in arguments]
    return pkgutil.resolve_name(path)(*given, **{name: made(value) for name, value in keywords.items()})


class _Graphs(nn.Module):
    """Two convolutions over a graph, as its first tutorial has them."""

    def __init__(self, kind: str, **keywords: Any) -> None:
        super().__init__()
        made = getattr(import_module("torch_geometric.nn"), kind)
        self.first, self.second = made(16, 32, **keywords), made(32, 7, **keywords)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.first(x, edge_index).relu(), 0.5, self.training)
        return self.second(x, edge_index).log_softmax(1)


class _Isomorphism(nn.Module):
    """A graph isomorphism network with a mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        geometric = import_module("torch_geometric.nn")
        self.convolution = geometric.GINConv(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32)))
        self.pool = geometric.global_mean_pool
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.convolution(x, edge_index), batch))


def _equivariant() -> nn.Module:
    from e3nn import o3

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct("8x0e+4x1o", "1x0e+1x1o", "8x0e+4x1o")
            self.linear = o3.Linear("8x0e+4x1o", "4x0e")

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(self.product(x, y))

    return Layer()


_CLIP: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"layers": 2, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32},
    "text_cfg": {"context_length": 16, "vocab_size": WORDS, "width": 32, "heads": 2, "layers": 2},
}
_NETS = "monai.networks.nets."
_VOLUME = (1, 1, 32, 32, 32)
_SEG = "segmentation_models_pytorch"
_SMALL = {"encoder_weights": None, "in_channels": 3, "classes": 2}
_GRAPH = ((NODES, 16), _edges)

_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
_LARGER = ((BATCH, 3, 64, 64),)
_PICTURE = ((BATCH, 3, 32, 32),)
_LINE = ((BATCH, 48, 32),)
_TEXT = (_words(BATCH, 48),)

# fmt: off
_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Input, ...]]] = {
    "geometric gcn": (partial(_Graphs, "GCNConv"), _GRAPH),
    "geometric gcn, without self loops": (partial(_Graphs, "GCNConv", add_self_loops=False), _GRAPH),
    "geometric gat": (partial(_Graphs, "GATConv"), _GRAPH),
    "geometric gatv2": (partial(_Graphs, "GATv2Conv"), _GRAPH),
    "geometric sage": (partial(_Graphs, "SAGEConv"), _GRAPH),
    "geometric transformer": (partial(_Graphs, "TransformerConv"), _GRAPH),
    "geometric gin": (_Isomorphism, (*_GRAPH, _belongs)),
    "geometric deep gcn": (_of("torch_geometric.nn.models.GCN", 16, 32, 3, 7, dropout=0.2, norm="batch"), _GRAPH),
    "geometric deep sage": (_of("torch_geometric.nn.models.GraphSAGE", 16, 32, 3, 7, jk="cat"), _GRAPH),
    "egnn": (_of("egnn_pytorch.EGNN", dim=16), ((BATCH, 12, 16), (BATCH, 12, 3))),
    "e3nn tensor product": (_equivariant, ((8, 20), (8, 4))),
    "monai unet": (_of(_NETS + "UNet", 3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2, dropout=0.1), (_VOLUME,)),
    "monai swin unetr": (_of(_NETS + "SwinUNETR", 1, 2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4),
     drop_rate=0.1), ((1, 1, 64, 64, 64),)),
    "monai unetr": (_of(_NETS + "UNETR", 1, 2, (32, 32, 32), feature_size=8, hidden_size=48, mlp_dim=64, num_heads=4),
     (_VOLUME,)),
    "monai segresnet": (_of(_NETS + "SegResNet", init_filters=8, dropout_prob=0.2), (_VOLUME,)),
    "monai vnet": (_of(_NETS + "VNet"), (_VOLUME,)),
    "monai attention unet": (_of(_NETS + "AttentionUnet", 3, 1, 2, (8, 16, 32), (2, 2)), (_VOLUME,)),
    "monai dynunet": (_of(_NETS + "DynUNet", 3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32],
     deep_supervision=True), (_VOLUME,)),
    "monai densenet": (_of(_NETS + "DenseNet121", 3, 1, 2, init_features=8, growth_rate=4), ((2, 1, 32, 32, 32),)),
    "segmentation unet": (_of(_SEG + ".Unet", "resnet18", **_SMALL), _LARGER),
    "segmentation unet++": (_of(_SEG + ".UnetPlusPlus", "resnet18", **_SMALL), _LARGER),
    "segmentation deeplabv3+": (_of(_SEG + ".DeepLabV3Plus", "mobilenet_v2", **_SMALL), _LARGER),
    "segmentation fpn": (_of(_SEG + ".FPN", "efficientnet-b0", **_SMALL), _LARGER),
    "segmentation segformer": (_of(_SEG + ".Segformer", "mit_b0", **_SMALL), _LARGER),
    "open_clip": (_of("open_clip.CLIP", **_CLIP), ((BATCH, 3, 32, 32), _words(BATCH, 16))),
    "open_clip coca": (_of("open_clip.CoCa", multimodal_cfg={"width": 32, "heads": 2, "layers": 2, "context_length": 16,
     "vocab_size": WORDS}, embed_dim=32, vision_cfg={**_CLIP["vision_cfg"], "attentional_pool": True,
     "output_tokens": True}, text_cfg={**_CLIP["text_cfg"], "embed_cls": True, "output_tokens": True}),
     ((BATCH, 3, 32, 32), _words(BATCH, 16))),
    "x-transformers decoder": (_of("x_transformers.TransformerWrapper", num_tokens=WORDS, max_seq_len=48,
     attn_layers=_of("x_transformers.Decoder", dim=32, depth=2, heads=4, rotary_pos_emb=True, attn_kv_heads=2)), _TEXT),
    "x-transformers encoder": (_of("x_transformers.TransformerWrapper", num_tokens=WORDS, max_seq_len=48,
     attn_layers=_of("x_transformers.Encoder", dim=32, depth=2, heads=4, ff_glu=True, attn_dropout=0.1)), _TEXT),
    "vit-pytorch vit": (_of("vit_pytorch.ViT", dropout=0.1, emb_dropout=0.1, **_VIT), _PICTURE),
    "vit-pytorch simple": (_of("vit_pytorch.SimpleViT", **_VIT), _PICTURE),
    "vit-pytorch cct": (_of("vit_pytorch.cct.CCT", img_size=32, embedding_dim=32, num_layers=2, num_heads=2,
     num_classes=5), _PICTURE),
    "vit-pytorch cait": (_of("vit_pytorch.cait.CaiT", cls_depth=1, layer_dropout=0.1, **_VIT), _PICTURE),
    "vit-pytorch deepvit": (_of("vit_pytorch.deepvit.DeepViT", **_VIT), _PICTURE),
    "vit-pytorch max vit": (_of("vit_pytorch.max_vit.MaxViT", num_classes=5, dim=16, depth=(1, 1), window_size=4,
     dim_head=8), ((BATCH, 3, 32, 32),)),
    "performer": (_of("performer_pytorch.PerformerLM", num_tokens=WORDS, max_seq_len=48, dim=32, depth=2, heads=4,
     causal=False), _TEXT),
    "conformer": (_of("conformer.Conformer", 32, depth=2, dim_head=8, heads=4, conv_dropout=0.1), _LINE),
    "linformer": (_of("linformer.LinformerLM", num_tokens=WORDS, dim=32, seq_len=48, depth=2, k=16, heads=4), _TEXT),
    "nystromformer": (_of("nystrom_attention.Nystromformer", dim=32, depth=2, dim_head=8, heads=4, num_landmarks=16),
     _LINE),
    "perceiver": (_of("perceiver_pytorch.Perceiver", num_freq_bands=4, depth=2, max_freq=10.0, num_latents=16,
     latent_dim=32, num_classes=5, latent_heads=2, weight_tie_layers=True), ((BATCH, 16, 16, 3),)),
    "gmlp": (_of("g_mlp_pytorch.gMLP", num_tokens=WORDS, dim=32, depth=3, seq_len=48, prob_survival=0.8), _TEXT),
    "gateloop": (_of("gateloop_transformer.Transformer", 32, num_tokens=WORDS, depth=2, dim_head=8, heads=4), _TEXT),
    "mambapy": (_of("mambapy.mamba.Mamba", _of("mambapy.mamba.MambaConfig", d_model=32, n_layers=2)), _LINE),
    "tabnet": (_of("pytorch_tabnet.tab_network.TabNet", 12, 3, n_d=8, n_a=8,
     group_attention_matrix=torch.eye(12)), ((64, 12),)),
    "neuralop fno": (_of("neuralop.models.FNO", n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16,
     n_layers=2), ((BATCH, 1, 32, 32),)),
    "neuralop tfno": (_of("neuralop.models.TFNO", n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16,
     n_layers=2, factorization="tucker", implementation="factorized", rank=0.2), ((BATCH, 1, 32, 32),)),
    "denoising diffusion unet": (_of("denoising_diffusion_pytorch.Unet", dim=16, dim_mults=(1, 2), attn_dim_head=8,
     attn_heads=2), ((BATCH, 3, 16, 16), _times)),
    "vector quantize": (_of("torch.nn.Sequential", _of("torch.nn.Linear", 32, 32),
     _of("vector_quantize_pytorch.VectorQuantize", dim=32, codebook_size=16)), ((2, 40, 32),)),
    "tcn": (_of("pytorch_tcn.TCN", 8, [16, 16, 16], dropout=0.1), ((BATCH, 8, 48),)),
    "efficientnet-pytorch": (_of("efficientnet_pytorch.EfficientNet.from_name", "efficientnet-b0"), _LARGER),
    "kornia hardnet": (_of("kornia.feature.HardNet", pretrained=False), ((8, 1, 32, 32),)),
}
# fmt: on


def models() -> dict[str, Build]:
    return {name: partial(_build, *entry) for name, entry in _MODELS.items()}


def _build(make: Callable[[], nn.Module], inputs: tuple[Input, ...]) -> Subject:
    return Subject(make(), partial(drawn, inputs))
