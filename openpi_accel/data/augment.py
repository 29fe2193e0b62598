"""Image augmentation on the device, with augmax 0.4.1's numbers (the reference; a cheaper twin must agree).

Shape letters: B batch, H W image height and width.
"""

import augmax
import jax
import jax.numpy as jnp
import numpy as np

Images = dict[str, jax.Array]

# x / 255 * 2 - 1 as the host computes it, looked up: compiled, the division would become a product with 1 / 255, whose
# rounding differs from what upstream's loader sends.
_FLOAT_OF_PIXEL = np.arange(256, dtype=np.float32) / np.float32(255) * np.float32(2) - np.float32(1)


def to_float(images: Images) -> Images:
    """camera -> B H W 3 uint8 becomes float32 in [-1, 1]; float images pass through."""
    return {
        camera: jnp.asarray(_FLOAT_OF_PIXEL)[image] if image.dtype == jnp.uint8 else image
        for camera, image in images.items()
    }


def augment(rng: jax.Array, images: Images) -> Images:
    """Random crop and rotation (not for wrist cameras) and colour jitter, each image of the batch on its own.

    Every camera gets the same B keys, so leaving a camera out moves no random number.

    Args:
        rng: the step's preprocess key.
        images: camera -> B H W 3, uint8 or float32 in [-1, 1].

    Returns:
        camera -> B H W 3 float32 in [-1, 1].
    """
    # augmax relies on implicit rank promotion, which strict runs forbid for our own code.
    with jax.numpy_rank_promotion("allow"):
        augmented = {camera: _augment_camera(rng, camera, image) for camera, image in to_float(images).items()}
    # Without a barrier XLA fuses the augmentation into the forward and the backward pass of what reads the images, and
    # so computes it several times over: in the demo's step on a CPU, 2.4 times the whole step's time.
    return jax.lax.optimization_barrier(augmented)


def _augment_camera(rng: jax.Array, camera: str, image: jax.Array) -> jax.Array:
    batch, height, width, _ = image.shape
    transforms = []
    if "wrist" not in camera:
        transforms += [
            augmax.RandomCrop(int(width * 0.95), int(height * 0.95)),
            augmax.Resize(width, height),
            augmax.Rotate((-5, 5)),
        ]
    transforms.append(augmax.ColorJitter(brightness=0.3, contrast=0.4, saturation=0.5))
    image = jax.vmap(augmax.Chain(*transforms))(jax.random.split(rng, batch), image / 2.0 + 0.5)
    return image * 2.0 - 1.0
