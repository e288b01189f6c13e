"""A reward model's scores are those it gives each text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from tests.models.helpers import FP32
from tests.tiny import BOS, EOS, make_model, make_tokenizer, spread
from verl.core.errors import ModelError
from verl.models.load import load_reward_model

CONVERSATIONS = [
    ([{"role": "user", "content": "What is 1 + 2 ?"}], "3 ."),
    ([{"role": "system", "content": "Reply with the number only."}, {"role": "user", "content": "7 + 8 ="}], "15"),
    ([{"role": "user", "content": "Hello, world!"}], "The answer to the following problem is the number 42, user."),
    ([{"role": "user", "content": "x"}], ""),
]


def alone(folder: Path, ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
@pytest.mark.parametrize("chat", [True, False])
def test_batching_changes_no_score(tmp_path: Path, pad: str, chat: bool) -> None:
    """pad = eos: transformers looks for the last token that is not padding, and must find the same one in a batch."""
    options: dict[str, Any] = {"own": {}, "eos": {"pad_token_id": EOS}, "none": {"pad_token_id": None}}[pad]
    folder = make_model(tmp_path / "rm", "llama", head="reward", chat=chat, **options)
    model = load_reward_model(folder, FP32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [model.render(*c) for c in CONVERSATIONS]
    want = [alone(folder, tokenizer(text)["input_ids"]) for text in texts]
    assert model.score(CONVERSATIONS) == pytest.approx(want, abs=1e-4)
    assert model.score(CONVERSATIONS[:1]) == pytest.approx(want[:1], abs=1e-4)
    assert len({round(x, 3) for x in want}) == len(want)
    assert model.truncated == 0


def test_text_is_the_models_own_template_or_concatenation(tmp_path: Path) -> None:
    chat = load_reward_model(make_model(tmp_path / "chat", head="reward"), FP32)
    assert chat.render(*CONVERSATIONS[0]) == (
        "<|im_start|>user\nWhat is 1 + 2 ?<|im_end|>\n<|im_start|>assistant\n3 .<|im_end|>\n"
    )
    plain = load_reward_model(make_model(tmp_path / "plain", head="reward", chat=False), FP32)
    assert plain.render(*CONVERSATIONS[0]) == "What is 1 + 2 ?3 ."


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_one_bos_at_most(tmp_path: Path, chat: bool, bos: bool) -> None:
    """With `bos` the tokenizer adds a BOS and the chat template writes one as well."""
    model = load_reward_model(make_model(tmp_path / "rm", head="reward", chat=chat, bos=bos), FP32)
    text = model.render(*CONVERSATIONS[0])
    assert text.startswith("<|bos|>") == (chat and bos)
    ids = model.encode(text)
    assert ids.count(BOS) == int(bos) and (ids[0] == BOS) == bos


def test_long_texts_lose_their_beginning_and_are_counted(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "rm", head="reward", chat=False, bos=True)
    model = load_reward_model(folder, FP32, max_length=12)
    long = ([{"role": "user", "content": "State the final answer to the following problem: 7 + 8 ="}], " 15 .")
    ids = model.encode(model.render(*long))
    full = AutoTokenizer.from_pretrained(folder)(model.render(*long))["input_ids"]
    assert ids == [BOS, *full[-11:]] and len(full) > 12
    assert model.truncated == 1
    model.score([long, CONVERSATIONS[3]])
    assert model.truncated == 2


def test_an_encoder_with_its_own_special_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat=False)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        num_labels=1, max_position_embeddings=64, hidden_dropout_prob=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    bert = BertForSequenceClassification(config)
    spread(bert)
    bert.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_reward_model(tmp_path, FP32)
    assert model.max_length == 64
    want = [alone(tmp_path, tokenizer(model.render(*c))["input_ids"]) for c in CONVERSATIONS]
    assert model.score(CONVERSATIONS) == pytest.approx(want, abs=1e-4)


def test_empty_text_and_a_refusing_template_are_one_line(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "rm", head="reward", chat=False)
    with pytest.raises(ModelError, match="conversation 0 is empty text"):
        load_reward_model(folder, FP32).score([([{"role": "user", "content": ""}], "")])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') if messages[0]['role'] == 'system' }}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="no system role"):
        load_reward_model(folder, FP32).score(CONVERSATIONS[1:2])


@pytest.mark.parametrize("chat", [True, False])
def test_parts_are_read_as_text_and_null_as_nothing(tmp_path: Path, chat: bool) -> None:
    model = load_reward_model(make_model(tmp_path / "rm", "llama", head="reward", chat=chat), FP32)
    odd = [{"role": "system", "content": None}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    plain = [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]
    assert model.render(odd, "b") == model.render(plain, "b")
    assert model.render([{"role": "user"}, *odd], "b")


def test_a_template_that_raises_is_one_line(tmp_path: Path) -> None:
    model = load_reward_model(make_model(tmp_path / "rm", "llama", head="reward"), FP32)
    model.tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(ModelError, match="refuses these messages"):
        model.render([{"role": "user", "content": "a"}], "b")


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    model = load_reward_model(make_model(tmp_path / "rm", "llama", head="reward", vocab=100), FP32)
    with pytest.raises(ModelError, match="do not belong together"):
        model.score(CONVERSATIONS)
