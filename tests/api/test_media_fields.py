"""Pictures and videos in `/generate`: every form they come in, their places in the prompt, and what is refused."""

import asyncio
import base64
import contextlib
import io
import re
import sys

import httpx
import msgspec
import numpy as np
import pytest
import tiny_llava
from app_under_test import App
from byte_tokenizer import VOCAB_SIZE
from PIL import Image
from served_app import ServedApp
from timeouts import until

from tureen.contract.types import NO_TOKEN
from tureen.dialects.sglang import generate as sglang
from tureen.media.loader import MediaLoader
from tureen.requests import media_fields
from tureen.requests.generation import Run

PER_PICTURE = 16  # tokens: 28 / 7 a side
IMAGE, VIDEO = VOCAB_SIZE + 0, VOCAB_SIZE + 1  # ids that the tokenizer has and the model has not
RNG = np.random.default_rng(11)
CLIP = {**tiny_llava.CLIP, "model_type": "clip_vision_model"}
SIGLIP = {**tiny_llava.CLIP, "model_type": "siglip_vision_model"}
LLAVA = {"model_type": "llava", "vision_config": CLIP, "text_config": {}, "image_token_index": IMAGE}
ONEVISION = {
    "model_type": "llava_onevision",
    "vision_config": SIGLIP,
    "text_config": {},
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "image_grid_pinpoints": tiny_llava.LARGE_GRID,
    "vision_aspect_ratio": "anyres_max_3",
}


def _png(size=(28, 28)):
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (*size, 3), dtype=np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


CAT, DOG, HEN = (_png() for _ in range(3))


def _make_loader(hf=LLAVA, variant="llava-clip", **options):
    return MediaLoader(hf, tiny_llava.PREPROCESSORS[variant], **{"media_path": None, "allowed_domains": (), **options})


@pytest.fixture(scope="module")
def app():
    """The model's tokenizer knows `<image>`, whose id lies behind the vocabulary, as that of LLaVA 1.6 does."""
    with App(media=_make_loader(), special=("<image>",)) as one:
        yield one
        one.check_idle()


@pytest.fixture(scope="module")
def splitting_app():
    """The tokenizer knows no placeholder."""
    with App(media=_make_loader({**LLAVA, "image_token_index": None})) as one:
        yield one
        one.check_idle()


@pytest.fixture(scope="module")
def video_app():
    with App(media=_make_loader(ONEVISION, "onevision"), special=("<image>", "<video>")) as one:
        yield one
        one.check_idle()


@pytest.fixture(scope="module")
def text_app():
    with App() as one:
        yield one


def _body(text="a<image>b", image_data=CAT, tokens=4, **fields):
    return {
        "text": text,
        "image_data": image_data,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
        **fields,
    }


def _usage(answer):
    return answer["meta_info"]["prompt_tokens"]


def _error(app, status=400, **body):
    response = app.post(**body)
    assert response.status_code == status, response.text
    return response.json()["error"]


# ---- forms


@pytest.mark.parametrize("picture", [CAT, f"data:image/png;base64,{CAT}", [CAT]])
def test_one_picture_of_one_prompt_is_a_string_or_a_list_of_one(app, picture):
    answer = app.generate(**_body(image_data=picture))
    assert _usage(answer) == 2 + PER_PICTURE
    assert answer["output_ids"] == app.generate(**_body())["output_ids"]


def test_several_pictures_of_one_prompt_are_a_list_in_the_order_of_their_placeholders(app):
    one = app.generate(**_body("<image>a<image>", [CAT, DOG]))
    other = app.generate(**_body("<image>a<image>", [DOG, CAT]))
    assert _usage(one) == _usage(other) == 1 + 2 * PER_PICTURE
    assert one["output_ids"] != other["output_ids"]


def test_a_batch_gives_each_prompt_its_own(app):
    texts = ["a<image>", "b", "c<image><image>", "d<image>", "e"]
    pictures = [CAT, None, [DOG, HEN], [CAT], []]
    answers = app.generate(**_body(texts, pictures))
    assert [_usage(one) - 1 for one in answers] == [PER_PICTURE, 0, 2 * PER_PICTURE, PER_PICTURE, 0]
    for text, picture, answer in zip(texts, pictures, answers, strict=True):
        assert app.generate(**_body(text, picture))["output_ids"] == answer["output_ids"]


def test_one_string_goes_to_every_prompt_of_a_batch_and_is_loaded_once(app, monkeypatch):
    loaded = []
    load = app.state.media.load

    async def count(references, modality, field):
        loaded.append((references, field))
        return await load(references, modality, field)

    monkeypatch.setattr(app.state.media, "load", count)
    answers = app.generate(**_body(["a<image>", "b<image>"], CAT))
    assert [_usage(one) for one in answers] == [1 + PER_PICTURE] * 2
    assert loaded == [((CAT,), "image_data")]


@pytest.mark.parametrize(
    ("text", "given", "field"),
    [
        ("a<image>", [[CAT]], "image_data"),
        ("a<image>", [None], "image_data"),
        ("a<image>", 7, "image_data"),
        (["a<image>", "b<image>"], [CAT], "image_data"),
        (["a<image>", "b<image>"], [CAT, 5], "image_data[1]"),
        (["a<image>", "b<image>"], [], "image_data"),
    ],
)
def test_other_forms_are_refused_by_name(app, text, given, field):
    error = _error(app, **_body(text, given))
    assert error["message"].startswith(field) or field in error["message"]
    assert error["param"].startswith("image_data")


def test_input_ids_hold_the_placeholder_even_where_it_lies_behind_the_vocabulary(app):
    answer = app.generate(**_body(None, CAT, input_ids=[97, IMAGE, 98]))
    assert _usage(answer) == 2 + PER_PICTURE
    assert answer["output_ids"] == app.generate(**_body())["output_ids"]
    batch = app.generate(**_body(None, [CAT, None], input_ids=[[97, IMAGE, 98], [97]]))
    assert [_usage(one) for one in batch] == [2 + PER_PICTURE, 1]


@pytest.mark.parametrize("token", [IMAGE + 1, -1, -2, -3, 10**9])
def test_other_ids_outside_the_vocabulary_are_refused(app, token):
    error = _error(app, **_body(None, CAT, input_ids=[97, token]))
    assert error["code"] == "token_id_out_of_range"


def test_the_placeholder_is_not_an_id_of_a_text_model(text_app):
    assert _error(text_app, input_ids=[97, IMAGE])["code"] == "token_id_out_of_range"


# ---- as many as there are placeholders


@pytest.mark.parametrize(
    ("text", "pictures"),
    [
        ("a", [CAT]),
        ("a<image>", []),
        ("a<image>", None),
        ("a<image>", [CAT, DOG]),
        ("<image><image>", [CAT]),
        ("<image><image>", CAT),
        ("<image", CAT),
        ("<Image>", CAT),
        ("< image>", CAT),
    ],
)
@pytest.mark.parametrize("kind", ["app", "splitting_app"])
def test_more_or_fewer_placeholders_than_pictures_are_refused(kind, text, pictures, request):
    error = _error(request.getfixturevalue(kind), **_body(text, pictures))
    num_pictures = 0 if pictures is None else len([pictures] if isinstance(pictures, str) else pictures)
    assert error["code"] == "image_placeholder_mismatch"
    assert error["param"] == "image_data"
    assert error["message"].startswith(
        f"text has {text.count('<image>')} <image>, but {num_pictures} pictures were sent"
    )


def test_the_prompt_at_fault_is_named(app):
    error = _error(app, **_body(["a<image>", "b"], [CAT, DOG]))
    assert (error["param"], error["code"]) == ("image_data[1]", "image_placeholder_mismatch")
    assert error["message"].startswith("text[1] has 0 <image>")
    error = _error(app, **_body(None, [CAT, DOG], input_ids=[[IMAGE], [97]]))
    assert error["message"].startswith("input_ids[1] has 0 <image>")


def test_ids_cannot_stand_for_a_picture_where_no_token_does(splitting_app):
    error = _error(splitting_app, **_body(None, CAT, input_ids=[97]))
    assert "needs a prompt of text" in error["message"]
    assert error["code"] == "image_placeholder_mismatch"


def test_a_picture_for_a_text_model_is_refused(text_app):
    for field in ("image_data", "video_data"):
        error = _error(text_app, text="a<image>", **{field: CAT})
        assert (error["param"], error["code"]) == (field, f"invalid_{field}")
        assert "takes only text" in error["message"]
    error = _error(text_app, text=["a", "b"], image_data=[None, CAT])
    assert error["param"] == "image_data[1]"


def test_to_a_text_model_the_placeholder_is_text(text_app):
    assert _usage(text_app.generate(text="a<image>", sampling_params={"max_new_tokens": 1})) == 8


def test_a_video_for_a_model_that_takes_none_is_refused(app):
    for text in ("a", "a<image>"):
        error = _error(app, text=text, video_data=CAT)
        assert (error["param"], "takes no videos" in error["message"]) == ("video_data", True)
    error = _error(app, **_body(image_data=[CAT, DOG], modalities=["video"]))
    assert (error["param"], "takes no videos" in error["message"]) == ("modalities", True)


@pytest.mark.parametrize("kind", ["app", "splitting_app"])
def test_a_hundred_thousand_placeholders_are_refused_before_anything_is_loaded(kind, request, monkeypatch):
    app = request.getfixturevalue(kind)
    monkeypatch.setattr(app.state.media, "load", None)
    monkeypatch.setattr(app.state, "context", _roomy(app.state.context))
    for text in ("<image>" * 100_000, "<image>x" * 100_000, "<image" * 100_000):
        assert _error(app, **_body(text))["code"] == "image_placeholder_mismatch"
    error = _error(app, **_body("<image>" * 65, [CAT] * 65))
    assert "65 pictures" in error["message"]


def _roomy(context):
    info = msgspec.structs.replace(context.info, context_len=10**6, max_total_tokens=10**6)
    return msgspec.structs.replace(context, info=info)


def test_a_hundred_thousand_placeholder_ids_are_refused_before_anything_is_loaded(app, monkeypatch):
    monkeypatch.setattr(app.state.media, "load", None)
    error = _error(app, **_body(None, CAT, input_ids=[IMAGE] * 100_000))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("kind", ["app", "splitting_app"])
def test_other_dialects_refuse_a_placeholder_and_fetch_nothing(kind, text_app, request):
    app = request.getfixturevalue(kind)
    for body in ({"inputs": "a<image>"}, {"prompt": "a<image>"}):
        response = app.post(**body)
        assert response.status_code == 422, response.text
        assert "placeholder" in response.text
        assert text_app.post(**body).status_code == 200
    body = {"inputs": "![x](http://127.0.0.1:1/x.png) data:image/png;base64,AAAA"}
    assert app.post(**body).status_code == 200


def test_a_token_that_the_model_does_not_know_is_refused(app):
    with App(special=("<pad>",)) as other:
        for field in ("text", "inputs", "prompt"):
            response = other.post(**{field: "a<pad>"})
            assert response.status_code == (400 if field == "text" else 422), response.text
            assert "<pad>" in response.text


# ---- modalities


@pytest.mark.parametrize("modalities", [None, ["image"], ["multi-images"]])
def test_modalities_say_how_pictures_are_taken(video_app, modalities):
    tall = _png((112, 28))
    answer = video_app.generate(**_body("a<image>", tall, modalities=modalities))
    in_tiles = modalities != ["multi-images"]
    assert (_usage(answer) > 1 + PER_PICTURE + 1) is in_tiles


def test_several_pictures_are_multi_images_unless_it_is_said_otherwise(video_app):
    tall = [_png((112, 28)), _png((112, 28))]
    usages = [
        _usage(video_app.generate(**_body("<image><image>", tall, modalities=modalities)))
        for modalities in (None, ["multi-images"], ["multi-images", "multi-images"], ["image"], ["image", "image"])
    ]
    assert usages[0] == usages[1] == usages[2] == 2 * (PER_PICTURE + 1)
    assert usages[3] == usages[4] > usages[0]


def test_pictures_can_be_the_frames_of_a_video(video_app):
    pooled = 2 * 2  # features of a frame
    for placeholder in ("<video>", "<image>"):
        answer = video_app.generate(**_body(f"a{placeholder}", [CAT, DOG, HEN], modalities=["video"]))
        assert _usage(answer) == 1 + 3 * pooled + 1
    for modalities in (None, ["video"]):
        body = _body("a<video>", None, video_data=CAT, modalities=modalities)
        assert _usage(video_app.generate(**body)) == 1 + pooled + 1


def test_pictures_and_videos_stand_where_their_placeholders_do(video_app):
    body = _body("<video><image>", HEN, video_data=[DOG])
    answer = video_app.generate(**body)
    assert _usage(answer) > PER_PICTURE + 5
    assert answer["output_ids"] != video_app.generate(**body | {"text": "<image><video>"})["output_ids"]
    error = _error(video_app, **body | {"text": "<video><video>"})
    assert error["code"] == "image_placeholder_mismatch"
    assert "0 <image> and 2 <video>, but 1 pictures and 1 videos were sent" in error["message"]


@pytest.mark.parametrize("modalities", [["image"], ["image", "video"], []])
def test_modalities_of_no_pictures_say_nothing(video_app, text_app, modalities):
    body = {"text": ["a", "b"], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    for app in (video_app, text_app):
        texts = [[one["text"] for one in app.generate(**body, **more)] for more in ({}, {"modalities": modalities})]
        assert texts[0] == texts[1]


def test_a_picture_may_be_an_object_with_its_reference_as_url(app):
    wanted = app.generate(**_body("a<image>b<image>", [CAT, DOG]))["output_ids"]
    for pictures in ([{"url": CAT}, {"url": DOG, "detail": "auto"}], [CAT, {"url": f"data:image/png;base64,{DOG}"}]):
        assert app.generate(**_body("a<image>b<image>", pictures))["output_ids"] == wanted
    batch = app.generate(**_body(["a<image>", "b", "c<image>"], [{"url": CAT}, None, [{"url": DOG}]]))
    alone = app.generate(**_body("c<image>", {"url": DOG}))
    assert batch[2]["output_ids"] == alone["output_ids"]


@pytest.mark.parametrize(
    ("pictures", "field", "part"),
    [
        (
            {"format": "processor_output", "pixel_values": []},
            "image_data.format",
            "this server prepares pictures itself",
        ),
        ([CAT, {"format": "precomputed_embedding"}], "image_data[1].format", "this server prepares pictures itself"),
        ({}, "image_data", '{"url": '),
        ([{"url": 5}], "image_data[0]", "got url 5"),
        ({"image": CAT}, "image_data", "got 'image' and no url"),
        ([{"url": CAT, "max_dynamic_patch": 2}], "image_data[0]", "got 'max_dynamic_patch' too"),
    ],
)
def test_an_object_that_is_no_picture_is_refused_with_what_it_may_be(app, pictures, field, part):
    error = _error(app, **_body("a<image>b<image>", pictures))
    assert (error["param"], part in error["message"]) == (field, True), error


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"modalities": ["audio"]}, "may be image, multi-images, video; got 'audio'"),
        ({"modalities": ["x" * 999]}, "…"),
        ({"modalities": []}, "has 0 entries"),
        ({"modalities": ["audio"], "image_data": None, "text": "a"}, "may be image, multi-images, video; got 'audio'"),
        ({"modalities": ["image", "image"]}, "has 2 entries"),
        ({"modalities": ["image", "video"], "image_data": [CAT, DOG], "text": "<image><image>"}, "has 2 entries"),
        ({"modalities": ["image"] * 3, "text": ["<image>"] * 2, "image_data": [CAT, DOG]}, "has 3 entries"),
    ],
)
def test_modalities_that_mean_nothing_are_refused(video_app, fields, part):
    error = _error(video_app, **_body() | fields)
    assert (error["param"], error["code"]) == ("modalities", "invalid_modalities")
    assert part in error["message"]


def test_a_batch_may_say_the_modality_of_each_prompt(video_app):
    tall = _png((112, 28))
    answers = video_app.generate(**_body(["<image>"] * 2, [tall, tall], modalities=["multi-images", "image"]))
    assert _usage(answers[0]) == PER_PICTURE + 1 < _usage(answers[1])


# ---- together with other fields


def test_embeddings_and_sessions_take_no_pictures(app):
    error = _error(app, **_body(None, CAT, input_embeds=[[0.0] * 4]))
    assert (error["param"], "input_embeds" in error["message"]) == ("image_data", True)
    error = _error(app, **_body(session_params={"id": "s"}))
    assert error["param"] == "session_params"


def test_an_embedding_request_takes_no_pictures(app):
    response = app.post("/encode", text="a<image>", image_data=CAT)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "image_data"
    for field, prompt, name in (("text", "a<image>", "text"), ("input_ids", [[97], [IMAGE]], "input_ids[1]")):
        error = app.post("/encode", **{field: prompt}).json()["error"]
        assert (error["code"], error["param"]) == ("image_placeholder_mismatch", name)


@pytest.mark.parametrize("start", [0, 1, PER_PICTURE])
def test_log_probabilities_of_a_picture_are_refused_and_those_behind_it_are_not(app, start):
    error = _error(app, **_body(return_logprob=True, logprob_start_len=start))
    assert error["param"] == "logprob_start_len"
    answer = app.generate(**_body("a<image>bcd", return_logprob=True, logprob_start_len=1 + PER_PICTURE))
    assert [token for _, token, _ in answer["meta_info"]["input_token_logprobs"]] == list(b"bcd")


def test_a_prompt_that_is_too_long_with_its_pictures_is_refused_with_the_numbers(app):
    text = "x" * 2040 + "<image>"
    error = _error(app, **_body(text))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "text"
    assert f"({2040 + PER_PICTURE} tokens)" in error["message"]
    assert "(2048 tokens)" in error["message"]
    error = _error(app, **_body("x" * 2020 + "<image>", tokens=40))
    assert error["code"] == "context_length_exceeded"


def test_n_samples_share_the_picture(app):
    body = _body()
    body["sampling_params"] |= {"n": 3, "temperature": 1, "sampling_seed": 5}
    answers = app.generate(**body)
    assert [_usage(one) for one in answers] == [2 + PER_PICTURE] * 3
    for index, answer in enumerate(answers):
        alone = _body()
        alone["sampling_params"] |= {"temperature": 1, "sampling_seed": 5 + index}
        assert app.generate(**alone)["output_ids"] == answer["output_ids"]


def test_a_stream_ends_with_the_whole_answer(app):
    events = app.events(**_body(tokens=9))
    whole = app.generate(**_body(tokens=9))
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert all(whole["text"].startswith(event["text"]) for event in events)


def test_another_picture_in_the_same_place_gives_another_answer_and_shares_only_the_text_before(app):
    text = "q" * 32 + "<image>" + "z" * 40
    app.post("/flush_cache")
    first, again, other = (app.generate(**_body(text, picture)) for picture in (CAT, CAT, DOG))
    assert [one["meta_info"]["cached_tokens"] for one in (first, again, other)] == [0, 80, 32]
    assert first["output_ids"] == again["output_ids"] != other["output_ids"]


def test_text_without_a_placeholder_needs_no_picture(app, text_app):
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    assert app.generate(**body)["output_ids"] == text_app.generate(**body)["output_ids"]


@pytest.mark.parametrize("text", ["<image>", "<image>b", "a<image>", "ab<image>cd<image>e"])
def test_a_tokenizer_that_knows_no_placeholder_gives_the_same_tokens_around_it(app, splitting_app, text):
    pictures = [CAT, DOG][: text.count("<image>")]
    known, split = app.generate(**_body(text, pictures)), splitting_app.generate(**_body(text, pictures))
    assert known["output_ids"] == split["output_ids"]
    assert _usage(known) == _usage(split)


def test_the_begin_token_comes_once_where_the_text_is_split(splitting_app, monkeypatch):
    seen = []
    tokenizer = splitting_app.state.context.tokenizer
    encode = type(tokenizer).encode

    def with_begin(self, text, *, add_special_tokens=True):
        found = encode(self, text)
        seen.append(add_special_tokens)
        return [257, *found] if add_special_tokens else found

    monkeypatch.setattr(type(tokenizer), "encode", with_begin)
    answer = splitting_app.generate(**_body("<image>a<image>", [CAT, DOG]))
    assert _usage(answer) == 1 + 1 + 2 * PER_PICTURE
    assert seen.count(True) == 1


# ---- refusals of the loader keep their names


def test_errors_name_the_picture(app):
    bad = base64.b64encode(b"no picture").decode()
    assert _error(app, **_body("<image>", bad))["param"] == "image_data"
    assert _error(app, **_body("<image><image>", [CAT, bad]))["param"] == "image_data[1]"
    assert _error(app, **_body(["<image>", "<image>"], [CAT, bad]))["param"] == "image_data[1]"
    error = _error(app, **_body(["a", "<image><image>"], [None, [CAT, bad]]))
    assert (error["param"], error["code"]) == ("image_data[1][1]", "invalid_image")
    assert re.match(r"image_data\[1\]\[1\] ", error["message"])


def test_files_and_urls_that_are_not_allowed_are_forbidden(app):
    assert _error(app, 403, **_body(image_data="cat.png"))["code"] == "local_media_disabled"
    error = _error(app, 403, **_body("<image><image>", [CAT, "http://127.0.0.1/cat.png"]))
    assert (error["code"], error["param"]) == ("media_url_forbidden", "image_data[1]")


def test_pictures_are_counted(app):
    before = app.metrics()
    picture = _png()
    app.generate(**_body(["a<image>", "b<image>"], picture))
    app.generate(**_body(image_data=picture))
    counts = [app.metrics()[name] - before[name] for name in ("num_pictures_total", "num_pictures_encoded_total")]
    assert counts == [3, 1]


def test_model_info_says_whether_the_model_sees(app, text_app):
    for one, sees in ((app, True), (text_app, False)):
        assert one.request("GET", "/model_info").json()["has_image_understanding"] is sees


# ---- time


def test_the_time_to_load_counts_against_the_deadline(app, monkeypatch):
    load = app.state.media.load

    async def slow(references, modality, field):
        await asyncio.sleep(0.2)
        return await load(references, modality, field)

    monkeypatch.setattr(app.state.media, "load", slow)
    answer = app.post(**_body(deadline_ms=150, tokens=500)).json()
    if "error" in answer:
        assert answer["error"]["code"] == "deadline_unreachable"
    else:
        assert answer["meta_info"]["finish_reason"]["reason"] == "deadline"


def _hold_up(state, monkeypatch, seconds=3600.0):
    """Make loading take so long. Returns the fields whose loading has begun, and those whose loading has ended."""
    begun, ended, load = [], [], state.media.load

    async def slow(references, modality, field):
        begun.append(field)
        try:
            await asyncio.sleep(seconds)
            return await load(references, modality, field)
        finally:
            ended.append(field)

    monkeypatch.setattr(state.media, "load", slow)
    return begun, ended


@pytest.mark.parametrize("field", ["deadline_ms", "ttft_deadline_ms"])
def test_a_deadline_is_kept_while_pictures_are_loaded(app, monkeypatch, field):
    begun, ended = _hold_up(app.state, monkeypatch)
    error = _error(app, 503, **_body(**{field: 60}, rid="late"))
    assert (error["code"], error["param"]) == ("deadline_unreachable", field)
    assert begun == ended == ["image_data"]
    assert app.state.num_running == 0


@pytest.mark.parametrize(("rid", "num_aborted"), [("mine", 4), ("mine_1", 2), ("mine_1_0", 1), (None, 4)])
def test_an_abort_ends_the_loading_by_every_name_of_the_body(app, monkeypatch, rid, num_aborted):
    begun, ended = _hold_up(app.state, monkeypatch)
    body = _body(["<image>", "<image>"], CAT, rid="mine")
    body["sampling_params"] |= {"n": 2, "temperature": 1}

    async def scenario():
        posted = asyncio.create_task(app.http.post("/generate", json=body))
        await until(lambda: begun)
        assert app.state.num_running == 4
        duplicate = await app.http.post("/generate", json=_body(rid="mine_1"))
        assert duplicate.json()["error"]["code"] == "duplicate_rid"
        assert app.state.abort("another") == 0
        assert app.state.abort(rid) == num_aborted
        app.state.abort(rid)
        return await posted

    response = app.run(scenario())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "aborted")
    assert begun == ended == ["image_data"]
    assert app.state.num_running == 0


def test_what_was_accepted_before_the_server_drains_is_answered(app, monkeypatch):
    begun, _ = _hold_up(app.state, monkeypatch, 0.2)

    async def scenario():
        posted = asyncio.create_task(app.http.post("/generate", json=_body()))
        await until(lambda: begun)
        monkeypatch.setattr(app.state.lifecycle, "is_draining", True)
        late = [await app.http.post("/generate", json=one) for one in (_body(), {"inputs": "a"}, {"prompt": "a"})]
        return await posted, late

    accepted, late = app.run(scenario())
    assert accepted.status_code == 200
    assert [one.status_code for one in late] == [503] * 3


def test_latencies_count_from_before_pictures_are_loaded(app, monkeypatch):
    names = ("time_to_first_token_seconds_sum", "e2e_request_latency_seconds_sum")
    before = app.metrics()
    _hold_up(app.state, monkeypatch, 0.3)
    assert app.generate(**_body())["meta_info"]["e2e_latency"] >= 0.3
    assert all(app.metrics()[name] - before[name] >= 0.3 for name in names)


# ---- memory


@pytest.mark.parametrize("pictures", [[[CAT], [DOG], [HEN]], [[CAT, DOG, HEN], [], []]])
def test_a_body_may_have_so_many_pixels_each_picture_counted_once(app, monkeypatch, pictures):
    size = 28 * 28 * 3
    texts = ["a" + "<image>" * len(row) for row in pictures]
    monkeypatch.setattr(media_fields, "MAX_PIXEL_BYTES", 3 * size)
    app.generate(**_body(texts, pictures))
    again = [[CAT], [f"data:;base64,{CAT}"], [CAT, DOG], [HEN, CAT]]
    app.generate(**_body(["<image>" * len(row) for row in again], again))
    monkeypatch.setattr(media_fields, "MAX_PIXEL_BYTES", 3 * size - 1)
    error = _error(app, **_body(texts, pictures))
    assert error["code"] == "invalid_image"
    assert error["param"] == ("image_data[2]" if len(pictures[0]) == 1 else "image_data[0]")


def test_pixels_are_kept_once_for_all_samples_by_what_could_send_them_to_another_engine(app, monkeypatch):
    seen = []
    generate = app.client.generate

    def record(request, *more):
        seen.extend(item.pixels for item in request.media)
        return generate(request, *more)

    monkeypatch.setattr(app.client, "generate", record)
    body = _body(["a<image>", "b<image>"], [CAT, f"data:;base64,{CAT}"], tokens=1900)
    body["sampling_params"] |= {"n": 2, "temperature": 1, "ignore_eos": True}
    other = {"text": "a", "sampling_params": {"max_new_tokens": 1}}

    async def scenario():
        plan = await sglang.prepare(body, app.state)
        run = Run(app.state, plan.plan)
        async with contextlib.aclosing(run.updates(interval=1)) as updates:
            async for _ in updates:
                break
            assert len(seen) == 4
            assert len(set(map(id, seen))) == 1
            pixels = seen.pop()
            seen.clear()
            await app.http.post("/generate", json=other)  # so that the engine's loop holds another message
            await until(lambda: app.client.stats.num_running >= 4)
            count = sys.getrefcount(pixels)
            assert not any(output.finish for output in run.outputs)
            return count, plan

    count, _ = app.run(scenario())
    assert count == 2 + 2  # `pixels`, the call's argument; the items of two prompts, which all samples share


def test_a_client_that_leaves_while_its_picture_is_loaded_leaves_nothing_behind(monkeypatch):
    with ServedApp(media=_make_loader()) as server:
        state = server.state
        load, (begun, ended) = state.media.load, _hold_up(state, monkeypatch)
        server.abandon("/generate", _body(), lambda: begun)
        assert ended == ["image_data"]
        state.media.load = load
        answer = httpx.post(f"{server.url}/generate", json=_body()).json()
        assert _usage(answer) == 2 + PER_PICTURE
        assert state.num_running == 0


def test_no_digest_is_a_token_or_the_mark_of_an_embedding(app, monkeypatch):
    seen = []
    generate = app.client.generate

    def record(request, *more):
        seen.append(request)
        return generate(request, *more)

    monkeypatch.setattr(app.client, "generate", record)
    app.generate(**_body("a<image>b<image>c<image>", [CAT, DOG, CAT]))
    [request] = seen
    first, second, third = request.media
    assert [item.start for item in request.media] == [1, 2 + PER_PICTURE, 3 + 2 * PER_PICTURE]
    assert first.digest == third.digest != second.digest
    ids = [set(request.token_ids[item.start : item.start + item.num_tokens]) for item in request.media]
    assert ids[0] == ids[2] != ids[1]
    assert all(len(one) == 1 and -(2**63) <= min(one) < NO_TOKEN for one in ids)
    assert [token for token in request.token_ids if token >= 0] == list(b"abc")
