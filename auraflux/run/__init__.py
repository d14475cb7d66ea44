"""From text to tokens and back: tokenizer, chat template, sampler, and the loop that generates."""
