"""A model id, a folder or a demo -> local files, a commit, the layers that hold an operator, and the loaded model."""
