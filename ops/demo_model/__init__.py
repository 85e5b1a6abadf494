"""A folder of data only. It is installed as `workers.demo_model`, so that `headgate up` finds its default model in a
wheel too."""
