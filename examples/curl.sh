#!/bin/sh
# Semantic variables with curl: two deferred calls feed a third, by names in headers.
#
#     sh examples/curl.sh
#
# OPENAI_BASE_URL and MODEL for another gateway or model.
set -eu

url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
model=${MODEL:-parrot-demo}
session="tale-$$-$(date +%s)"

complete() { # prompt, then headers
    prompt=$1
    shift
    curl -sSf "$url/completions" "$@" -H "X-Parrot-Session: $session" \
        -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" -H 'Content-Type: application/json' \
        -d "{\"model\": \"$model\", \"prompt\": \"$prompt\", \"max_tokens\": 24, \"seed\": 7}"
    echo
}

echo "Deferred: answered at once, with a reference where the text would be."
complete 'Once upon a time there was a little' -H 'X-Parrot-Defer: true' -H 'X-Parrot-Output: hero'
complete 'They lived in a big' -H 'X-Parrot-Defer: true' -H 'X-Parrot-Output: place'

echo "Not deferred: waits in the gateway for both, then for its own text."
complete 'A little {{who}}. They lived in a big {{where}}. One day' \
    -H 'X-Parrot-Input: who=hero, where=place'

echo "What ran, as a picture for mermaid.live or any Markdown viewer."
curl -sSf "$url/sessions/$session/graph?format=mermaid" \
    -H "Authorization: Bearer ${OPENAI_API_KEY:-none}"
