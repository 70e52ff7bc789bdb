"""Arguments of a training step for the models of transformers, by task and by what their forward takes.

Several ways to call a model may be tried: :func:`ways` lists them, the most telling first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.zoo.models import seeded

BATCH = 2
LENGTH = 48
SHORT = 40  # of decoders
WORDS = (3, 60)
"""Token ids that mean nothing special in the small vocabularies."""
LABELS = 2
SOUND = 8000
Batch = Callable[[int], dict[str, Any]]


@dataclass
class Maker:
    """Makes the arguments for one model.

    Attributes:
        model: whose forward is looked at for the names of its arguments.
        task: of which labels are made.
        padded: whether the first step's mask has padding and the second's none, or the other way around.
    """

    model: torch.nn.Module
    task: str
    padded: bool = False

    def __post_init__(self) -> None:
        self.config: Any = self.model.config
        self.names = set(inspect.signature(self.model.forward).parameters)

    def mask(self, step: int, length: int) -> torch.Tensor:
        """Ones in one step, padding on the right, later on the left, in the next."""
        mask = torch.ones(BATCH, length, dtype=torch.long)
        if (step % 2 == 0) == self.padded:
            mask[-1, length - 7 - step :] = 0
        return mask

    def tokens(self, step: int, length: int, salt: int = 0) -> torch.Tensor:
        return torch.randint(*WORDS, (BATCH, length), generator=seeded(step + salt))

    def text(self, step: int, length: int = LENGTH) -> dict[str, Any]:
        found: dict[str, Any] = {"input_ids": self.tokens(step, length)}
        if self.task == "sequence_classification" and isinstance(end := _first(self.config, ("eos_token_id",)), int):
            found["input_ids"][:, -1] = end
        if "attention_mask" in self.names:
            found["attention_mask"] = self.mask(step, length)
        if self._is_pair() and not self._has_labels():
            found["decoder_input_ids"] = self.tokens(step, SHORT, 50)
        return found | self.labels(step, found)

    def choices(self, step: int) -> dict[str, Any]:
        """Two texts to choose from."""
        given = {
            name: value.unsqueeze(1).repeat(1, 2, 1) for name, value in self.text(step).items() if value.dim() == 2
        }
        given["input_ids"][:, 1] = self.tokens(step, LENGTH, 30)
        return {**given, "labels": (torch.arange(BATCH) + step) % 2}

    def _is_pair(self) -> bool:
        return "decoder_input_ids" in self.names

    def _has_labels(self) -> bool:
        return "labels" in self.names and self.task not in ("base", "pretraining")

    def labels(self, step: int, given: dict[str, Any]) -> dict[str, Any]:
        """What the model is to learn, where its forward takes that."""
        if self.task == "question_answering" and "start_positions" in self.names:
            places = torch.randint(1, 20, (2, BATCH), generator=seeded(step + 70))
            return {"start_positions": places[0], "end_positions": places[1] + 5}
        if self.task == "object_detection" and "labels" in self.names:
            return {"labels": [self._boxes(step, number) for number in range(BATCH)]}
        if self.task == "universal_segmentation" and "mask_labels" in self.names:
            return self._masks(step)
        if not self._has_labels():
            return {}
        return {"labels": self._targets(step, given)}

    def _targets(self, step: int, given: dict[str, Any]) -> torch.Tensor:
        generator, size = seeded(step + 90), self._image_size()
        if self.task in ("seq_to_seq_causal_lm", "speech_seq_2_seq") and self._is_pair():
            return self.tokens(step, SHORT, 20)
        if self.task in ("ctc", "rnnt"):
            return torch.randint(*WORDS, (BATCH, 4), generator=generator) % 28 + 1
        if self.task == "token_classification":
            return torch.randint(0, LABELS, (BATCH, LENGTH), generator=generator)
        if self.task == "semantic_segmentation":
            return torch.randint(0, LABELS, (BATCH, size, size), generator=generator)
        if self.task == "depth_estimation":
            return torch.rand(BATCH, size, size, generator=generator)
        if self.task in ("image_classification", "video_classification", "audio_classification"):
            return (torch.arange(BATCH) + step) % LABELS
        if self.task in ("sequence_classification", "multiple_choice"):
            return (torch.arange(BATCH) + step) % LABELS
        if self.task == "visual_question_answering":
            return torch.rand(BATCH, self.config.num_labels, generator=generator)
        return self._next_words(given)

    def _next_words(self, given: dict[str, Any]) -> torch.Tensor:
        words = given["input_ids"].clone()
        if self.task == "masked_lm":
            words = (words + 1) % WORDS[1]
        if "attention_mask" in given and self.padded:
            words[given["attention_mask"] == 0] = -100
        return words

    def _image_size(self) -> int:
        found = _first(self.config, ("image_size", "img_size", "input_size"))
        found = found[0] if isinstance(found, (list, tuple)) else found
        return found if isinstance(found, int) and found >= 16 else 64

    def _boxes(self, step: int, number: int) -> dict[str, torch.Tensor]:
        boxes = torch.rand(2, 4, generator=seeded(step + number)) * 0.2 + 0.3
        return {"class_labels": torch.tensor([0, 1]), "boxes": boxes}

    def _masks(self, step: int) -> dict[str, Any]:
        size = self._image_size()
        masks = [(torch.rand(2, size, size, generator=seeded(step + n)) > 0.5).float() for n in range(BATCH)]
        return {"mask_labels": masks, "class_labels": [torch.tensor([0, 1]) for _ in range(BATCH)]}

    def pixels(self, step: int, size: int | None = None, frames: tuple[int, ...] = ()) -> torch.Tensor:
        channels = _first(self.config, ("num_channels", "in_channels", "in_chans"))
        channels = channels if isinstance(channels, int) and channels in (1, 3, 4) else 3
        size = size or self._image_size()
        return torch.randn(BATCH, *frames, channels, size, size, generator=seeded(step + 10))

    def image(self, step: int, size: int | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {"pixel_values": self.pixels(step, size)}
        if self._is_pair():
            found["decoder_input_ids"] = self.tokens(step, SHORT, 50)
        return found | self.labels(step, found | {"input_ids": self.tokens(step, SHORT, 50)})

    def video(self, step: int) -> dict[str, Any]:
        frames = _first(self.config, ("num_frames", "frames_per_clip")) or 4
        name = "pixel_values_videos" if "pixel_values_videos" in self.names else "pixel_values"
        return {name: self.pixels(step, None, (frames,)), **self.labels(step, {})}

    def sound(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = {"input_values": torch.randn(BATCH, SOUND, generator=seeded(step))}
        if "attention_mask" in self.names:
            found["attention_mask"] = self.mask(step, SOUND)
        if self._is_pair() and not self._has_labels():
            found["decoder_input_ids"] = self.tokens(step, SHORT, 50)
        return found | self.labels(step, found)

    def wave(self, step: int) -> dict[str, Any]:
        """Sound with a channel."""
        return {"input_values": torch.randn(BATCH, 1, SOUND, generator=seeded(step))}

    def features(self, step: int, last: bool = False) -> dict[str, Any]:
        """Spectrograms: mel bins in the middle, or last."""
        bins = _first(self.config, ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim")) or 16
        length = _first(self.config, ("max_length",)) or 96 if last else 2 * (self._positions() or 64)
        shape = (BATCH, length, bins) if last else (BATCH, bins, length)
        name = "input_features" if "input_features" in self.names else "input_values"
        found: dict[str, Any] = {name: torch.randn(*shape, generator=seeded(step))}
        if last and "attention_mask" in self.names:
            found["attention_mask"] = self.mask(step, length)
        if self._is_pair() and not self._has_labels():
            found["decoder_input_ids"] = self.tokens(step, SHORT, 50)
        return found | self.labels(step, found | {"input_ids": self.tokens(step, SHORT)})

    def _positions(self) -> Any:
        return _first(self.config, ("max_source_positions",))

    def text_and_image(self, step: int, size: int | None = None) -> dict[str, Any]:
        return {**self.text(step), "pixel_values": self.pixels(step, size)}

    def patches_alone(self, step: int) -> dict[str, Any]:
        """The same without a text, for the part of a model that sees."""
        size, channels = self.config.patch_size, getattr(self.config, "in_channels", 3)
        width = channels * getattr(self.config, "temporal_patch_size", 1) * size * size
        values = torch.randn(BATCH * 16, width, generator=seeded(step))
        name = "hidden_states" if "hidden_states" in self.names else "pixel_values"
        return {name: values, "grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}

    def patches(self, step: int) -> dict[str, Any]:
        """Images cut into patches, of which a grid of sizes tells, and tokens that stand for them."""
        vision = getattr(self.config, "vision_config", self.config)
        size, merge = vision.patch_size, getattr(vision, "spatial_merge_size", 2)
        count = 16
        width = 3 * getattr(vision, "temporal_patch_size", 1) * size * size
        values = torch.randn(BATCH * count, width, generator=seeded(step + 10))
        grid = torch.tensor([[1, 4, 4]] * BATCH)
        found = self._with_images(self.text(step), count // merge**2)
        return {**found, "pixel_values": values, "image_grid_thw": grid}

    def images_in_text(self, step: int, size: int | None = None) -> dict[str, Any]:
        """A text with as many tokens for the image as the model makes of it."""
        values = self.pixels(step, size)
        return {**self._with_images(self.text(step), self._tokens_of(values)), "pixel_values": values}

    def _tokens_of(self, values: torch.Tensor) -> int:
        with torch.no_grad():
            found = self.model.get_image_features(pixel_values=values)  # type: ignore[operator]
        found = getattr(found, "pooler_output", found)
        tensors = [found] if isinstance(found, torch.Tensor) else list(found)
        return sum(math.prod(one.shape[:-1]) for one in tensors) // BATCH

    def _with_images(self, given: dict[str, Any], count: int) -> dict[str, Any]:
        token = _first(self.config, ("image_token_id", "image_token_index"))
        ids, more = given["input_ids"], {}
        images = torch.full((BATCH, count), token)
        more["input_ids"] = torch.cat([ids[:, :1], images, ids[:, 1:]], 1)
        for name, value in (("attention_mask", 1), ("labels", -100)):
            if name in given:
                filled = torch.full((BATCH, count), value)
                more[name] = torch.cat([given[name][:, :1], filled, given[name][:, 1:]], 1)
        if "mm_token_type_ids" in self.names:
            more["mm_token_type_ids"] = (more["input_ids"] == token).long()
        if "token_type_ids" in self.names:
            more["token_type_ids"] = (more["input_ids"] == token).long()
        return {**given, **more}

    def series(self, step: int) -> dict[str, Any]:
        """Values of the past and the future, with what else forecasting models ask for."""
        length = _first(self.config, ("context_length", "seq_length")) or 32
        ahead = _first(self.config, ("prediction_length", "horizon_length")) or 8
        lags = max(getattr(self.config, "lags_sequence", None) or [0])
        channels = _first(self.config, ("num_input_channels", "input_size")) or 1
        more = () if channels == 1 and lags else (channels,)
        features = getattr(self.config, "num_time_features", 0)
        known: dict[str, Any] = {
            "past_values": torch.randn(BATCH, length + lags, *more, generator=seeded(step)),
            "future_values": torch.randn(BATCH, ahead, *more, generator=seeded(step + 1)),
            "past_time_features": torch.randn(BATCH, length + lags, features, generator=seeded(step + 2)),
            "future_time_features": torch.randn(BATCH, ahead, features, generator=seeded(step + 3)),
            "past_observed_mask": torch.ones(BATCH, length + lags, *more),
        }
        return {name: value for name, value in known.items() if name in self.names}


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """The first of these settings that a configuration or one within it has."""
    for name in names:
        if isinstance(found := getattr(config, name, None), (int, list, tuple)):
            return found
    for inner in vars(config).values():
        if hasattr(inner, "model_type") and (found := _first(inner, names)) is not None:
            return found
    return None


def ways(maker: Maker) -> list[tuple[str, Batch]]:
    """Ways to call the model, each with what a row says of it."""
    names = maker.names
    found: list[tuple[str, Batch]] = []
    if maker.task == "multiple_choice":
        found.append(("", maker.choices))
    if "past_values" in names:
        found.append(("", maker.series))
    if "grid_thw" in names:
        found.append(("patches", maker.patches_alone))
    if "input_ids" in names and ("pixel_values" in names or "image_grid_thw" in names):
        found += [("patches of images in a text", maker.patches)] if "image_grid_thw" in names else []
        found += [("images in a text", maker.images_in_text)] if hasattr(maker.model, "get_image_features") else []
        found += [("text and images", maker.text_and_image)]
        found += [("text and images", lambda step: maker.text_and_image(step, 64))]
    if "input_ids" in names:
        alone = "text alone" if "pixel_values" in names or "input_features" in names else ""
        found.append((alone, maker.text))
    if "pixel_values" in names and "input_ids" not in names:
        sizes = (None, 64, 224, 96)
        found += [("", partial(maker.image, size=size)) for size in sizes]
    if names & {"pixel_values_videos", "pixel_values"}:
        found.append(("", maker.video))
    if "input_features" in names:
        found += [("", maker.features), ("", lambda step: maker.features(step, True))]
    if "input_values" in names:
        found += [
            ("", maker.sound),
            ("", maker.wave),
            ("", lambda step: maker.features(step, True)),
            ("", maker.features),
        ]
    return found


def own_ways(maker: Maker, kind: str) -> list[tuple[str, Callable[[int], dict[str, Any]]]]:
    """Calls that only this type knows."""
    make = _WAYS.get(kind)
    return [("", lambda step: make(maker, step))] if make else []


def _as_long(maker: Maker, step: int) -> dict[str, Any]:
    """Labels as long as the text."""
    return {**maker.text(step), "labels": maker.tokens(step, LENGTH, 20)}


def _with_boxes(maker: Maker, step: int) -> dict[str, Any]:
    """A place on the page for each word."""
    return {**maker.text(step), "bbox": torch.rand(BATCH, LENGTH, 4, generator=seeded(step))}


_WAYS: dict[str, Callable[[Maker, int], dict[str, Any]]] = {"fsmt": _as_long, "bros": _with_boxes}
