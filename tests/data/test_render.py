"""Chats to ids: special tokens once, system prompt and examples in place, and what a template must not do."""

import pytest

from tests.tiny import BOS, CHAT, make_tokenizer
from verl.core import ConfigError, DataError
from verl.data import Renderer, check_template, render

USER = {"role": "user", "content": "Why?"}
ONE = [USER]


def test_equals_the_library_s_own_encoding(tokenizer):
    chat = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "A"}, USER]
    want = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert list(render(chat, tokenizer)) == want


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("content", ["Why?", "<|bos|>Why?"])
def test_one_bos_on_every_path(chat, bos, content):
    """Also where the text brings its own."""
    tokenizer = make_tokenizer(chat=chat, bos=bos)
    ids = render([{"role": "user", "content": content}], tokenizer)
    if bos:
        assert ids[0] == BOS and ids[1] != BOS
    else:
        assert ids.count(BOS) == content.count("<|bos|>")


def test_plain_text_is_the_tokenizer_s_own_encoding():
    tokenizer = make_tokenizer(chat=False, bos=True)
    assert list(render(ONE, tokenizer)) == tokenizer("Why?")["input_ids"]


def test_plain_text_of_longer_chats(tokenizer):
    renderer = Renderer(tokenizer, "Be brief.", (("3 + 4 =", "7"),), "off")
    assert renderer.text(ONE) == "Be brief.\n\nUser: 3 + 4 =\n\nAssistant: 7\n\nUser: Why?\n\nAssistant:"
    assert Renderer(tokenizer, mode="off").text(ONE) == "Why?"


def test_system_prompt_and_examples(tokenizer):
    own = [{"role": "system", "content": "old"}, USER]
    renderer = Renderer(tokenizer, "new", (("q", "a"),))
    assert [(m["role"], m["content"]) for m in renderer.messages(own)] == [
        ("system", "new"),
        ("user", "q"),
        ("assistant", "a"),
        ("user", "Why?"),
    ]
    kept = Renderer(tokenizer, None, (("q", "a"),)).messages(own)
    assert [m["content"] for m in kept] == ["old", "q", "a", "Why?"]
    assert own == [{"role": "system", "content": "old"}, USER]


def test_tools_reach_the_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}" + CHAT
    assert Renderer(tokenizer).text(ONE, [{"name": "search"}]).startswith("[search]<|im_start|>user")


def test_text_parts(tokenizer):
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert Renderer(tokenizer, mode="off").text(chat) == "ab"


def test_encoding_in_chunks_keeps_the_order(tokenizer, monkeypatch):
    texts = [f"text {i}" for i in range(7)]
    whole = Renderer(tokenizer).encode(texts)
    monkeypatch.setattr("verl.data.rendering.ENCODE_CHUNK", 3)
    assert Renderer(tokenizer).encode(texts) == whole == [tuple(tokenizer(t)["input_ids"]) for t in texts]


def test_template_that_refuses(tokenizer):
    strict = make_tokenizer()
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + CHAT
    )
    with pytest.raises(
        DataError, match=r"the chat template refuses this prompt \(No system role\); change data.system_prompt"
    ):
        Renderer(strict, "S").text(ONE)


def test_template_required():
    with pytest.raises(ConfigError, match=r"data\.chat_template=on, but the tokenizer has no chat template"):
        Renderer(make_tokenizer(chat=False), mode="on")


FINDINGS = [
    ("", CHAT, ()),
    ("{{ messages | length }}", CHAT, ("answer rendered as history differs", "earlier turns are rendered otherwise")),
    ("{{ bos_token }}{{ bos_token }}", CHAT, ("writes BOS twice",)),
    ("{{ raise_exception('never') }}", CHAT, ("refuses a plain chat: never",)),
    (
        "",
        CHAT.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"),
        ("answer rendered as history differs",),
    ),
]


@pytest.mark.parametrize(("head", "body", "want"), FINDINGS)
def test_template_check(head, body, want):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = head + body
    found = check_template(tokenizer)
    assert len(found) == len(want) and all(w in f for w, f in zip(want, found, strict=True))


def test_template_check_knows_a_missing_bos():
    tokenizer = make_tokenizer(bos=True)
    assert check_template(tokenizer) == ()
    tokenizer.chat_template = CHAT
    assert check_template(tokenizer) == (
        "the chat template writes no BOS, though the tokenizer puts one before plain text",
    )
    assert check_template(make_tokenizer(chat=False)) == ()


def test_text_parts_are_rendered_as_their_text_and_null_as_nothing(tokenizer):
    parts = [{"role": "system", "content": None}, {"role": "user", "content": [{"type": "text", "text": "a b"}]}]
    plain = [{"role": "system"}, {"role": "user", "content": "a b"}]
    assert tokenizer.decode(render(parts, tokenizer)) == tokenizer.decode(render(plain, tokenizer))
    assert "None" not in Renderer(tokenizer).text(parts)


def test_an_image_in_an_earlier_turn_is_refused(tokenizer):
    chat = [
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with pytest.raises(DataError, match="text or text parts"):
        render(chat, tokenizer)


def test_whatever_a_template_raises_is_one_line():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(DataError, match="refuses this prompt"):
        render([{"role": "user", "content": "a"}], tokenizer)
