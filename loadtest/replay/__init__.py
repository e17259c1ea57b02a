"""An open-loop replay of request traces against anything that speaks the OpenAI API: `python -m loadtest.replay`."""
