"""Chat templates in the manners of real models: loops, namespaces, macros, tools, parts, complaints. And their tokens."""

# ruff: noqa: E501 - a line break would be part of the text

from __future__ import annotations

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

ZEPHYR = """{% for m in messages %}
{% if m.role == 'user' %}
{{ '<|user|>\n' + m.content + eos_token }}
{% elif m.role == 'system' %}
{{ '<|system|>\n' + m.content + eos_token }}
{% elif m.role == 'assistant' %}
{{ '<|assistant|>\n' + m.content + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "1 Jan 2025" %}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: tools\n" }}{% endif %}
{{- "Today: " ~ date_string ~ "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system }}{{- "<|eot_id|>" }}
{%- for message in rest %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("One call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}<|eot_id|>
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Roles must take turns: user, assistant, user, assistant, ...') }}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{ ' [INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' -%}
{{ ' ' + message['content'] + ' ' + eos_token }}
{%- else -%}
{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif -%}
{%- endfor -%}"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function %}
            {{- '\n<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (message['content'] | trim) + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

GRANITE = """{%- macro turn(role, text) %}<|start_of_role|>{{ role }}<|end_of_role|>{{ text }}<|end_of_text|>
{% endmacro -%}
{%- if tools %}{{ turn('available_tools', tools | map(attribute='function') | list | tojson(indent=4)) }}{% endif -%}
{%- for message in messages %}{% set text = message.content %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set text %}{{ text }}<|tool_call|>{{ message.tool_calls | map(attribute='function') | list | tojson }}{% endset %}
{%- elif message.role == 'tool' %}{% set message = dict(message, role='tool_response') %}{% endif -%}
{{ turn(message.role, text) }}
{%- endfor -%}
{%- if add_generation_prompt %}<|start_of_role|>assistant{{ ' ' ~ (controls | default({}) | tojson) if controls }}<|end_of_role|>
{%- endif -%}"""

OF_ROLES = """{% for message in messages %}{% if message['role'] == 'system' and tools %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + (tools | tojson) + '<|/tool|>' + '<|end|>' }}
{%- else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
"""Makes control tokens of roles."""

CALL_TEXTS = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}{% endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['tool_calls'] %}
{%- for tool in message['tool_calls'] %}
{{- '<｜Assistant｜>' if loop.first else '\n' }}{{ '<｜tool▁call▁begin｜>' + tool['type'] + '\n' + tool['function']['name'] }}
{{- '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' %}
{%- set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- endif %}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
"""Takes the arguments of calls as text only."""

LLAVA = """{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}
{%- if message['role'] != 'assistant' %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}
{%- else %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
"""Takes lists of parts only."""

LOOPS = """{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}
{{ '%s' | format(message.role | upper) }}:{{ message.content | replace('\n', '\n  ') | indent(2) }}</s>
{% if loop.index >= 40 %}{% break %}{% endif %}
{% generation %}{{ ['a', loop.previtem.role if loop.previtem is defined, loop.length] | join('-') }}{% endgeneration %}
{% endfor %}
{% for m in messages %}{{ m.content.replace('a', 'b').strip() }}{{ ', '.join([m.role, 'x']) }}{% endfor %}
{{ messages | map(attribute='role') | unique | sort | join(', ') }} {{ '{}'.format(messages | length) }}
{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

ALL = {
    "chatml": CHATML,
    "zephyr": ZEPHYR,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "gemma": GEMMA,
    "granite": GRANITE,
    "of-roles": OF_ROLES,
    "loops": LOOPS,
}

SPECIAL = (
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
    "<|tool|>", "<|/tool|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
    "<start_of_turn>", "<end_of_turn>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>",
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<image>",
)  # fmt: skip
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "\n\n\n")
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
