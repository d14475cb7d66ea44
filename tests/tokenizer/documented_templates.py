"""Chat templates rewritten from the documentation of families whose own are not available.

Those of dots.llm1, ERNIE 4.5, Mixtral, OLMoE and Gemma 3 are published with their weights only, and Qwen4-Exp has none and gets
the format of Qwen3.5. They use the usual Jinja features: macros, namespaces, loops, filters, whitespace control, refusals.
"""

ERNIE = """
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for item in content if item.type == 'text' -%}{{- item.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- cls_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- text_of(message.content) + '\\n' -}}
    {%- elif message.role == 'user' -%}
        {{- 'User: ' + text_of(message.content) + '\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set thought = text_of(message.reasoning_content) -%}
        {{- 'Assistant: ' -}}
        {%- if thought %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n' }}{% endif -%}
        {{- text_of(message.content).lstrip('\\n') + sep_token -}}
    {%- else -%}
        {{- raise_exception('A ' ~ message.role ~ ' is not known.') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt is not defined or add_generation_prompt is true -%}
    {{- 'Assistant: ' -}}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}
"""

MIXTRAL = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, with an initial optional system message!') }}
    {%- endif %}
{%- endfor %}
"""

OLMOE = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] }}
{% elif message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

GEMMA3 = """{{ bos_token }}
{%- set first = namespace(text='') -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first.text = (messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text']) -%}
    {%- set first.text = first.text ~ '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first.text if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ '<start_of_image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

QWEN = """
{%- set last = namespace(user=-1) %}
{%- for message in messages if message.role == 'user' %}{%- set last.user = messages.index(message) %}{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nCall them as <tool_call><function=name><parameter=key>value</parameter></function></tool_call>.' }}
    {%- if messages[0].role == 'system' %}{{- '\\n\\n' + messages[0].content | trim }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = (message.content or '') | trim %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.user %}{{- '<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- ('\\n\\n' if loop.first and content else '\\n' if not loop.first else '') + '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}
                {{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}
"""  # noqa: E501

DOTS = """
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- '<|system|>' + message.content + '<|endofsystem|>' -}}
    {%- elif message.role == 'user' -%}
        {{- '<|userprompt|>' + message.content + '<|endofuserprompt|>' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|response|>' + message.content + '<|endofresponse|>' -}}
    {%- else -%}
        {{- raise_exception('dots.llm1 has no role ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|response|>' -}}{%- endif -%}
"""

OWN = {"dots1": DOTS, "ernie4_5_moe": ERNIE, "mixtral": MIXTRAL, "olmoe": OLMOE, "gemma3": GEMMA3, "qwen4_exp": QWEN}
