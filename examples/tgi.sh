#!/bin/sh
curl -s -X POST http://localhost:30000/generate -H 'Content-Type: application/json' -d '{
    "inputs": "My name is Olivier and I",
    "parameters": {"max_new_tokens": 20, "do_sample": true, "temperature": 0.7, "seed": 7, "details": true}
}'
