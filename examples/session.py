import requests

URL = "http://localhost:30000"
PARAMS = {"temperature": 0, "max_new_tokens": 16}


def say(session, text, after=None):
    body = {"text": text, "sampling_params": PARAMS, "session_params": {"id": session, "rid": after}}
    answer = requests.post(f"{URL}/generate", json=body).json()
    meta = answer["meta_info"]
    print(f"{answer['text']!r}  ({meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens were cached)")
    return meta["id"]


session = requests.post(f"{URL}/open_session", json={"capacity_of_str_len": 4000}).json()
first = say(session, "The largest river of South America is the")
second = say(session, " Its mouth lies in", after=first)
branch = say(session, " The fish in it are", after=first)
requests.post(f"{URL}/close_session", json={"session_id": session})
