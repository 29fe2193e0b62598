"""Files of upstream's own numbers: reading them, and the model that their parameters imply.

The layout: params/, obs/, actions, rng_key_data, noise, time, fwd/, grads/, augmented/, train/, sample/, trainable and
meta/. Any output may be absent. One golden may be spread over several .npz files, later ones winning. Where
`meta/num_samples` is n, outputs per sample hold the first n samples of the inputs only.

Shape letters: B batch, L prompt tokens, A action horizon, E action dim.
"""

import dataclasses
import pathlib
import zipfile
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from openpi_accel.config.schema import Architecture, GemmaConfig, LoraConfig, SiglipConfig
from openpi_accel.errors import UserError
from openpi_accel.types import Observation, Params

_LLM, _IMG = "params/PaliGemma/llm", "params/PaliGemma/img"
_BLOCK = f"{_IMG}/Transformer/encoderblock"


@dataclasses.dataclass(frozen=True)
class Golden:
    """The arrays of one golden, by their keys in the file."""

    name: str
    arrays: dict[str, np.ndarray]

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def __getitem__(self, key: str) -> np.ndarray:
        """Raises UserError where the golden lacks the key."""
        if key not in self.arrays:
            raise UserError(
                f"{self.name} has no {key!r}; it is no golden of the layout that goldens/README.md describes."
            )
        return self.arrays[key]

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays below `prefix/`, keyed by the rest of their path."""
        return {k[len(prefix) + 1 :]: v for k, v in self.arrays.items() if k.startswith(prefix + "/")}

    def meta(self, key: str, default: float | str | bool) -> float | str | bool:
        """A scalar below meta/, or the default."""
        array = self.arrays.get(f"meta/{key}")
        return default if array is None else array.item()

    @property
    def dtype(self) -> str:
        """Compute dtype that upstream used."""
        return str(self.meta("dtype", "float32"))

    @property
    def num_samples(self) -> int:
        """How many samples the outputs per sample hold."""
        return int(self.meta("num_samples", len(self["actions"])))

    def params(self) -> Params:
        """The nested parameter tree, float32."""
        tree: Params = {}
        for path, value in self.under("params").items():
            *folders, leaf = path.split("/")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[leaf] = jnp.asarray(value)
        return tree

    def observation(self) -> Observation:
        """The inputs, images as uint8."""
        return Observation(
            images={slot: jnp.asarray(image) for slot, image in sorted(self.under("obs/image").items())},
            image_masks={slot: jnp.asarray(mask) for slot, mask in sorted(self.under("obs/image_mask").items())},
            state=jnp.asarray(self["obs/state"]),
            tokenized_prompt=jnp.asarray(self["obs/tokenized_prompt"]),
            tokenized_prompt_mask=jnp.asarray(self["obs/tokenized_prompt_mask"]),
        )

    def key(self, name: str = "rng_key_data") -> jax.Array:
        """The random key stored under that name."""
        data = self[name]
        if data.shape != (2,):
            raise UserError(f"{self.name}: {name} has shape {data.shape}; the data of one key has shape (2,).")
        return jax.random.wrap_key_data(jnp.asarray(data, jnp.uint32))


def load_golden(paths: Sequence[str | pathlib.Path]) -> Golden:
    """Reads a golden from one or more .npz files.

    Raises:
        UserError: a file that is missing, no .npz, or holds no parameters or inputs.
    """
    arrays: dict[str, np.ndarray] = {}
    for path in map(pathlib.Path, paths):
        if not path.is_file():
            raise UserError(f"There is no file {path}. Give the path of a golden (.npz).")
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays |= {key: archive[key] for key in archive.files}
        except (OSError, ValueError, AttributeError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"{path} is no readable .npz file ({error}). Fetch or write it again.") from error
    golden = Golden(" + ".join(pathlib.Path(p).name for p in paths), arrays)
    _check_inputs(golden)
    return golden


def _check_inputs(golden: Golden) -> None:
    """Shapes and dtypes of the inputs agree with each other."""
    actions = golden["actions"]
    if actions.ndim != 3:
        raise UserError(f"{golden.name}: actions have shape {actions.shape}; expected B A E.")
    batch = len(actions)
    images, masks = golden.under("obs/image"), golden.under("obs/image_mask")
    if not images or set(images) != set(masks):
        raise UserError(
            f"{golden.name}: cameras {sorted(images)} have masks {sorted(masks)}; each camera needs its mask."
        )
    expected: dict[str, tuple[tuple[int, ...], str]] = {
        "actions": (actions.shape, "float32"),
        "obs/state": ((batch, actions.shape[2]), "float32"),
        "obs/tokenized_prompt": ((batch, *golden["obs/tokenized_prompt_mask"].shape[1:2]), "int32"),
        "obs/tokenized_prompt_mask": (golden["obs/tokenized_prompt"].shape, "bool"),
        **{f"obs/image/{slot}": ((batch, *image.shape[1:3], 3), "uint8") for slot, image in images.items()},
        **{f"obs/image_mask/{slot}": ((batch,), "bool") for slot in images},
        **{key: (shape, "float32") for key, shape in (("noise", actions.shape), ("time", (batch,))) if key in golden},
    }
    for key, (shape, dtype) in expected.items():
        if golden[key].shape != shape or golden[key].dtype != dtype:
            found = f"{golden[key].dtype} {golden[key].shape}"
            raise UserError(f"{golden.name}: {key} is {found}; the other inputs imply {dtype} {shape}.")


def architecture_of(golden: Golden, dtype: str | None = None) -> Architecture:
    """The sizes that the golden's parameters imply.

    Args:
        golden: parameters and inputs.
        dtype: compute dtype, float32 or bfloat16; None takes the golden's.

    Raises:
        UserError: parameters that are missing or contradict each other.
    """
    dtype = dtype or golden.dtype
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"The compute dtype {dtype!r} is neither float32 nor bfloat16.")
    pi05 = "params/time_mlp_in/kernel" in golden
    if bool(golden.meta("pi05", pi05)) != pi05:
        raise UserError(f"{golden.name}: meta/pi05 and the parameters disagree on whether this is pi0.5.")
    patch, _, _, width = _shape(golden, f"{_IMG}/embedding/kernel", 4)
    depth, _, heads, _ = _shape(golden, f"{_BLOCK}/MultiHeadDotProductAttention_0/query/kernel", 4)
    mlp_dim = _shape(golden, f"{_BLOCK}/MlpBlock_0/Dense_0/kernel", 3)[2]
    return Architecture(
        pi05=pi05,
        paligemma=_expert(golden, 0),
        action_expert=_expert(golden, 1),
        vision=SiglipConfig(width=width, depth=depth, mlp_dim=mlp_dim, num_heads=heads, patch_size=patch),
        vocab_size=_shape(golden, f"{_LLM}/embedder/input_embedding", 2)[0],
        action_dim=_shape(golden, "params/action_in_proj/kernel", 2)[0],
        action_horizon=golden["actions"].shape[1],
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
    )


def _expert(golden: Golden, index: int) -> GemmaConfig:
    suffix = ("", "_1")[index]
    q = f"{_LLM}/layers/attn/q_einsum{suffix}"
    depth, heads, width, head_dim = _shape(golden, f"{q}/w", 4)
    lora = None
    if f"{q}/lora_a" in golden:
        rank = _shape(golden, f"{q}/lora_a", 4)[3]
        table = golden["meta/lora_rank_alpha"]
        if table.shape != (2, 2) or int(np.nan_to_num(table[index, 0])) != rank:
            raise UserError(
                f"{golden.name}: meta/lora_rank_alpha ({table.tolist()}) does not fit adapters of rank {rank}."
            )
        lora = LoraConfig(rank=rank, alpha=float(table[index, 1]))
    return GemmaConfig(
        width=width,
        depth=depth,
        mlp_dim=_shape(golden, f"{_LLM}/layers/mlp{suffix}/linear", 3)[1],
        num_heads=heads,
        num_kv_heads=_shape(golden, f"{_LLM}/layers/attn/kv_einsum{suffix}/w", 5)[2],
        head_dim=head_dim,
        lora=lora,
    )


def _shape(golden: Golden, key: str, ndim: int) -> tuple[int, ...]:
    if golden[key].ndim != ndim:
        raise UserError(f"{golden.name}: {key} has shape {golden[key].shape}; expected {ndim} axes.")
    return golden[key].shape
