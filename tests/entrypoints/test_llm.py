"""The offline class on tiny models: arguments, answers, errors that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.utils.one_thread import one_thread  # noqa: F401  a fixture for the whole module
from tests.utils.tiny_models import TinyModels
from vllm import LLM, SamplingParams
from vllm.errors import ConfigError, RequestError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams

SPELLING = {ord("C"): 257, 257: ord("G"), ord("G"): 258, 258: ord("J"), ord("J"): ord("K")}
GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def llm(tiny_models: TinyModels) -> Iterator[LLM]:
    """FX-CHAIN: C leads to DEF G HI J K and the end."""
    made = LLM(
        str(tiny_models.chain(SPELLING)),
        dtype="float32",
        num_gpu_blocks_override=64,
        max_num_seqs=16,
        scheduling_policy="priority",
    )
    yield made
    made.llm_engine.shutdown()


def texts(outputs) -> list[str]:
    return [o.outputs[0].text for o in outputs]


def run(llm: LLM, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


@pytest.mark.parametrize(
    ("prompts", "num"),
    [
        ("ABC", 1),
        ({"prompt": "ABC"}, 1),
        (TokensPrompt(prompt_token_ids=[65, 66, 67]), 1),
        ({"prompt_token_ids": list(np.array([65, 66, 67]))}, 1),
        (["ABC", {"prompt_token_ids": [67]}, {"prompt": "C"}], 3),
        ((), 0),
    ],
)
def test_forms_of_prompts(llm: LLM, prompts, num: int) -> None:
    outputs = run(llm, prompts)
    assert texts(outputs) == ["DEFGHIJK"] * num
    for output in outputs:
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == [257, 71, 258, 74, 75]
        assert output.num_cached_tokens == 0


def test_prompts_given_as_ids_the_old_way(llm: LLM) -> None:
    assert texts(llm.generate(prompt_token_ids=[65, 67], sampling_params=GREEDY)) == ["DEFGHIJK"]
    assert len(llm.generate(prompt_token_ids=[[67], [67]], sampling_params=GREEDY)) == 2
    assert run(llm, ["ABC"], prompt_token_ids=[[1]])[0].prompt == "ABC", "the text is used"
    with pytest.raises(ValueError, match="1 prompts but 2 lists"):
        run(llm, ["ABC"], prompt_token_ids=[[1], [2]])
    with pytest.raises(ValueError, match="no prompts"):
        llm.generate()


def test_forms_of_parameters(llm: LLM) -> None:
    assert texts(run(llm, "ABC", {"temperature": 0, "max_tokens": 2})) == ["DEFG"]
    mixed = run(llm, ["C", "C"], [{"temperature": 0, "max_tokens": 1}, GREEDY])
    assert texts(mixed) == ["DEF", "DEFGHIJK"]
    assert len(run(llm, "ABC", None)[0].outputs[0].token_ids) == 6, "five tokens, then the end"
    with pytest.raises(ValueError, match="2 prompts but 1 sampling_params"):
        run(llm, ["C", "C"], [GREEDY])
    with pytest.raises(TypeError, match="no field 'max_token'; did you mean 'max_tokens'"):
        run(llm, "C", {"max_token": 1})
    with pytest.raises(TypeError, match="must be SamplingParams"):
        run(llm, "C", 7)


def test_the_callers_parameters_stay_as_they_are(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=3, logit_bias={65: 1.0}, allowed_token_ids=[65],
        guided_decoding=GuidedDecodingParams(regex="A+"),
    )  # fmt: skip
    before = params.clone()
    assert texts(run(llm, "C", params)) == ["AAA"]
    assert params == before


def test_end_of_sequence_and_usage(llm: LLM) -> None:
    (output,) = run(llm, "ABC", SamplingParams(temperature=0, max_tokens=50))
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("DEFGHIJK", "stop", None)
    assert answer.token_ids[-1] == 264
    assert answer.finished()
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", GREEDY, RequestError, "the prompt is empty"),
        ({"prompt_token_ids": []}, GREEDY, RequestError, "the prompt is empty"),
        ("A" * 512, GREEDY, RequestError, "512 tokens, but the model takes at most 511"),
        (
            {"prompt_token_ids": [320]},
            GREEDY,
            RequestError,
            "holds 320, but token ids go from 0 to 319",
        ),
        ({"prompt_token_ids": [-1]}, GREEDY, RequestError, "holds -1"),
        ({"prompt_token_ids": ["A"]}, GREEDY, TypeError, "must be int"),
        ({"prompt_token_ids": [True]}, GREEDY, TypeError, "must be int"),
        ([65], GREEDY, TypeError, "wrap token ids"),
        ({"text": "A"}, GREEDY, TypeError, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": "A", "multi_modal_data": {"image": 1}}, GREEDY, RequestError, "only text"),
        ({"encoder_prompt": "A"}, GREEDY, RequestError, "encoder-decoder"),
        ("A", SamplingParams(logprobs=21), RequestError, "logprobs may be at most 20"),
        (
            "A",
            SamplingParams(prompt_logprobs=21),
            RequestError,
            "prompt_logprobs may be at most 20",
        ),
        ("A", SamplingParams(n=17), RequestError, "at most 16"),
        ("A", SamplingParams(logit_bias={320: 5}), RequestError, "logit_bias holds 320"),
        ("A", SamplingParams(logit_bias={-1: 5}), RequestError, "logit_bias holds -1"),
        (
            "A",
            SamplingParams(allowed_token_ids=[9999]),
            RequestError,
            "allowed_token_ids holds 9999",
        ),
        ("A", {"guided_decoding": {"regex": "["}}, RequestError, "guided_regex cannot be used"),
    ],
)
def test_wrong_requests_leave_nothing_behind(llm: LLM, prompt, params, error, message: str) -> None:
    with pytest.raises(error, match=message):
        run(llm, ["ABC", prompt], params if isinstance(params, dict) else [GREEDY, params])
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(run(llm, ["ABC"])) == ["DEFGHIJK"], "the next call is answered, and only that"


def test_numbers_of_any_size(llm: LLM) -> None:
    """Numbers without an upper limit end neither a request nor the engine."""
    huge = 10**30
    for field in ("top_k", "max_tokens"):
        params = SamplingParams(**{field: huge}, allowed_token_ids=[65], stop_token_ids=[65, huge])
        assert texts(run(llm, "ABC", params, priority=[-(2**63)])) == [""]
    for priority in (2**63, -huge, 1.5):
        with pytest.raises(RequestError, match="priority must be"):
            run(llm, "ABC", priority=[priority])


def test_fields_set_after_construction_are_checked_too(llm: LLM) -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(RequestError, match="temperature must be a finite number"):
        run(llm, "A", params)


@pytest.mark.parametrize(
    ("bias", "token"), [({265: 100}, 265), ({300: 100}, 300)], ids=["added token", "padded row"]
)
def test_logit_bias_reaches_every_row_of_the_model(llm: LLM, bias, token: int) -> None:
    """Case C16."""
    alone = texts(run(llm, "ABC"))
    biased, neighbour = run(
        llm, ["ABC", "ABC"], [SamplingParams(temperature=0, max_tokens=1, logit_bias=bias), GREEDY]
    )
    assert biased.outputs[0].token_ids == [token]
    assert biased.outputs[0].text == ""
    assert [neighbour.outputs[0].text] == alone


def test_zero_alternatives_still_give_logprobs(llm: LLM) -> None:
    """Case C14."""
    (output,) = run(llm, "ABC", SamplingParams(temperature=0, max_tokens=3, logprobs=0))
    answer = output.outputs[0]
    assert [list(entry) for entry in answer.logprobs] == [[257], [71], [258]]
    for entry in answer.logprobs:
        (value,) = entry.values()
        assert -1e-3 < value.logprob <= 0
        assert value.rank == 1
    assert answer.cumulative_logprob == pytest.approx(
        sum(v.logprob for e in answer.logprobs for v in e.values())
    )
    assert run(llm, "ABC")[0].outputs[0].logprobs is None


def test_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    for _ in range(2):  # a cached prefix changes nothing (case C06)
        (output,) = run(llm, "CDEFGHIJK" * 3, params)
        told = output.prompt_logprobs
        assert len(told) == len(output.prompt_token_ids)
        assert told[0] is None
        assert told[1][257].rank == 1, "C leads to DEF"
        for token, entry in zip(output.prompt_token_ids[1:], told[1:], strict=True):
            assert token in entry
            assert len(entry) in (2, 3)


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        ("DEFGHIJ", False, "", "DEFGHIJ"),
        ("DEFGX", False, "DEFGHIJK", None),
        (["DEFGHIJ"], True, "DEFGHIJ", "DEFGHIJ"),
        ("HI", False, "DEFG", "HI"),
    ],
)
def test_stop_strings(llm: LLM, stop, include: bool, text: str, reason: str | None) -> None:
    """Case C20, whole answers."""
    params = SamplingParams(
        temperature=0, max_tokens=5, stop=stop, include_stop_str_in_output=include
    )
    answer = run(llm, "ABC", params)[0].outputs[0]
    assert (answer.text, answer.stop_reason) == (text, reason)
    assert answer.finish_reason == ("stop" if reason else "length")


def test_stop_token_ids_and_min_tokens(llm: LLM) -> None:
    answer = run(llm, "C", SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[258]))[
        0
    ].outputs[0]
    assert (answer.text, answer.stop_reason, answer.token_ids[-1]) == ("DEFG", 258, 258)
    answer = run(llm, "K", SamplingParams(temperature=0, max_tokens=9, min_tokens=4))[0].outputs[0]
    assert len(answer.token_ids) > 4, "the end is masked at first"
    assert 264 not in answer.token_ids[:4]
    answer = run(llm, "K", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].outputs[
        0
    ]
    assert answer.token_ids == [264, 264, 264]


def test_bad_words_and_allowed_ids(llm: LLM) -> None:
    answer = run(llm, "ABC", SamplingParams(temperature=0, max_tokens=3, bad_words=["HI"]))[
        0
    ].outputs[0]
    assert answer.token_ids[:2] == [257, 71]
    assert answer.token_ids[2] != 258
    params = SamplingParams(
        temperature=0, max_tokens=3, allowed_token_ids=[65, 66], ignore_eos=True
    )
    assert set(run(llm, "ABC", params)[0].outputs[0].token_ids) <= {65, 66}


def test_logits_processors(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def force(output_ids, logits):
        logits[ord("x")] = 1e6
        return logits

    def watch(prompt_ids, output_ids, logits):
        seen.append((list(prompt_ids), list(output_ids)))
        return logits

    params = SamplingParams(temperature=0, max_tokens=2, logits_processors=[watch, force])
    assert texts(run(llm, "ABC", params)) == ["xx"]
    assert seen == [([65, 66, 67], []), ([65, 66, 67], [ord("x")])]


def test_a_processor_that_fails_fails_its_request_only(llm: LLM) -> None:
    def broken(output_ids, logits):
        raise KeyError("my own mistake")

    params = [SamplingParams(max_tokens=3, logits_processors=[broken]), GREEDY]
    with pytest.raises(RequestError, match="my own mistake"):
        run(llm, ["ABC", "ABC"], params)
    assert texts(run(llm, "ABC")) == ["DEFGHIJK"]


def test_several_answers(llm: LLM) -> None:
    (output,) = run(llm, "ABC", SamplingParams(n=3, temperature=1.0, max_tokens=5))
    assert [a.index for a in output.outputs] == [0, 1, 2]
    assert texts([output]) == ["DEFGHIJK"]
    (output,) = run(llm, "ABC", SamplingParams(n=1, best_of=3, temperature=1.0, max_tokens=5))
    assert len(output.outputs) == 1
    assert output.outputs[0].cumulative_logprob is None


def test_priorities(llm: LLM) -> None:
    assert len(run(llm, ["ABC", "ABC"], priority=[5, -5])) == 2
    with pytest.raises(ValueError, match="2 prompts but 1 priorities"):
        run(llm, ["ABC", "ABC"], priority=[1])


def test_structured_output(llm: LLM) -> None:
    for form, text in (
        ({"choice": ["no", "yes"]}, ("no", "yes")),
        ({"regex": "[xy]{4}"}, None),
        ({"grammar": 'root ::= "x" "y"?'}, ("x", "xy")),
    ):
        params = {"temperature": 0, "max_tokens": 20, "guided_decoding": form}
        (output,) = run(llm, "ABC", params)
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].text in text if text else len(output.outputs[0].text) == 4
    with pytest.warns(DeprecationWarning):
        assert texts(run(llm, "A", guided_options_request={"guided_choice": ["on"]})) == ["on"]
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="must name one of"):
        run(llm, "A", guided_options_request={"guided_choice": ["a"], "guided_regex": "a"})


def test_chat_adds_no_second_bos(llm: LLM, tiny_models: TinyModels) -> None:
    """Case C26: the template writes the BOS, the tokenizer adds none to its text."""
    from tokenizers.processors import TemplateProcessing

    plain = llm.get_tokenizer()
    changed = tiny_models.tokenizer()
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 263)]
    )
    llm.set_tokenizer(changed)
    try:
        messages = [{"role": "user", "content": "C"}]
        (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
        assert chat.prompt == "<s>user:C;bot:"
        assert chat.prompt_token_ids.count(263) == 1
        (text,) = run(llm, chat.prompt)
        assert text.prompt_token_ids.count(263) == 2, "who writes a text is in charge of it"
        assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
        (other,) = llm.chat(
            messages, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}"
        )
        assert other.prompt == "C"
        assert texts([other]) == ["DEFGHIJK"]
        with pytest.raises(RequestError, match="role"):
            llm.chat([{"content": "C"}], GREEDY, use_tqdm=False)
    finally:
        llm.set_tokenizer(plain)


def test_beam_search(llm: LLM) -> None:
    found = llm.beam_search(["ABC", [67]], BeamSearchParams(beam_width=3, max_tokens=9))
    for output, num_prompt in zip(found, (3, 1), strict=True):
        assert len(output.sequences) == 3
        best = output.sequences[0]
        assert best.tokens[num_prompt:] == [257, 71, 258, 74, 75, 264]
        assert best.text.endswith("CDEFGHIJK")
        scores = [s.cum_logprob / len(s.tokens) for s in output.sequences]
        assert scores[0] > -1e-3
    for penalty in (1e300, -1e300):
        params = BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=penalty)
        assert len(llm.beam_search(["ABC"], params)[0].sequences) == 2
    with pytest.raises(RequestError, match="beam_width may be at most 10"):
        llm.beam_search(["ABC"], BeamSearchParams(beam_width=11, max_tokens=2))


def test_beam_search_is_no_lottery(llm: LLM) -> None:
    """What a step draws at some temperature, or which of two equal tokens, changes nothing."""
    params = BeamSearchParams(beam_width=3, max_tokens=5, temperature=50.0)
    found = [[s.tokens for s in llm.beam_search(["ABC"], params)[0].sequences] for _ in range(4)]
    assert found[1:] == found[:-1]


def test_one_text_and_what_is_none(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    assert llm.beam_search("AB", params) == llm.beam_search(["AB"], params)
    with pytest.raises(TypeError, match="BeamSearchParams, got SamplingParams"):
        llm.beam_search(["AB"], SamplingParams())
    for wrong in (7, {"prompt": "AB"}):
        with pytest.raises(TypeError, match="a list of token ids"):
            llm.beam_search([wrong], params)
    with pytest.raises(TypeError, match=r"prompts must be text.*got 5"):
        llm.generate(5)


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["ABC", "ABC"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "toks/s, output:" in shown


def test_what_is_not_served_says_so(llm: LLM) -> None:
    from vllm.lora.request import LoRARequest

    with pytest.raises(ConfigError, match="embedding models are not served"):
        llm.encode("A")
    with pytest.raises(RequestError, match="adapters are not served"):
        run(llm, "A", lora_request=LoRARequest("x", 1, "p"))
    with pytest.raises(RuntimeError, match="profiler"):
        llm.start_profile()
    with LLM.deprecate_legacy_api():
        assert LLM.DEPRECATE_LEGACY
    assert not LLM.DEPRECATE_LEGACY
