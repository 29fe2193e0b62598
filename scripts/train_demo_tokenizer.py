"""Trains the demo's small SentencePiece model, assets/demo/tokenizer.model.

It is laid out like PaliGemma's where the trainer looks: pad 0, end 1, begin 2, unknown 3, "\\n" a piece of its own,
digits split, bytes for what it has never seen, text left as it is. The sentences are made here; equal runs give equal
bytes.

    python scripts/train_demo_tokenizer.py [OUT]
"""

import io
import itertools
import os
import pathlib
import random
import sys

import _entry
import sentencepiece

VOCAB_SIZE = 512
DEFAULT_OUT = pathlib.Path(__file__).resolve().parent.parent / "assets" / "demo" / "tokenizer.model"

_VERBS = ("move to", "reach for", "pick up", "push", "pull", "grasp", "touch", "turn", "lift", "slide", "point at")
_COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple", "grey", "brown")
_THINGS = ("block", "bowl", "cup", "plate", "mug", "box", "ball", "drawer", "handle", "cloth", "bottle", "spoon", "lid")
_PLACES = (
    "on the table", "in the basket", "on the left", "on the right", "in the middle drawer", "next to the plate",
    "behind the box", "in front of the bowl", "on top of the shelf", "into the sink", "at the edge of the tray",
)  # fmt: skip
_WHOLE = (
    "open the gripper", "close the gripper", "open the top drawer", "close the cabinet door", "turn on the stove",
    "turn off the light", "fold the towel in half", "wipe the table with the sponge", "stack the cups",
    "put both moka pots on the stove", "pour the water into the glass", "go back to the start", "wait for the person",
    "hand over the screwdriver", "sort the bolts by size", "insert the plug into the socket", "press the button twice",
)  # fmt: skip


def sentences() -> list[str]:
    """Commands as people give them to robots, bare and in the forms that pi0 and pi0.5 put them into."""
    rng = random.Random(0)
    commands = list(_WHOLE)
    for verb, colour, thing in itertools.product(_VERBS, _COLOURS, _THINGS):
        commands.append(f"{verb} the {colour} {thing}")
        commands.append(f"{verb} the {colour} {thing} and place it {rng.choice(_PLACES)}")
    rng.shuffle(commands)
    forms = []
    for command in commands:
        bins = " ".join(str(rng.randrange(256)) for _ in range(rng.randrange(2, 9)))
        forms.append(command + "\n")
        forms.append(f"Task: {command}, State: {bins};\nAction: ")
    return forms


def train() -> bytes:
    """The serialised model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()),
        model_writer=model,
        vocab_size=VOCAB_SIZE,
        model_type="bpe",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        user_defined_symbols=["\n"],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        byte_fallback=True,
        num_threads=1,
        minloglevel=1,
    )
    return model.getvalue()


def main() -> None:
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_OUT
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_suffix(".tmp")
    aside.write_bytes(train())
    os.replace(aside, out)
    print(f"{out}: {out.stat().st_size} bytes, {VOCAB_SIZE} pieces")


if __name__ == "__main__":
    _entry.run(main)
