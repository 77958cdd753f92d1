"""`llmrl serve`: a run's model behind the server, asked by the real client."""

import re
import signal

import pytest

openai = pytest.importorskip("openai", reason="the client that the server is tested with")


@pytest.mark.slow
def test_a_run_is_served_until_it_is_interrupted(place):
    place.train("sft", "taught", steps=1)
    asked = {"model": "taught", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    with place.process("serve", "taught", "--port", "0", "--api-key", "secret", "--max-tokens", "5") as process:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        answers = [client.chat.completions.create(**asked) for _ in range(2)]
        assert 1 <= answers[0].usage.completion_tokens <= 5
        assert len({answer.choices[0].message.content for answer in answers}) == 1, "temperature 0 is honoured"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="other", max_retries=0).chat.completions.create(**asked)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
