"""Does a whole Megatron GPT compute the same bits in every layout? Forward, backward and three optimizer steps.

`plan.py` says what is run, `build.py` and `train.py` are what one rank does, `engine.py` hands runs to ranks,
`report.py` checks and shows the result, `command.py` is the command line.
"""
