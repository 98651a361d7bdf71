// Choose the brush of the pad: it is not chosen at the start, nor after the pad was cleared.
() => {
  const begin = Date.now();
  const choose = () => {
    const brush = document.querySelector('#pad button[aria-label="Brush"]');
    const idle = document.querySelector('#pad .empty');
    if (brush && idle) brush.click();
    if ((!brush || idle) && Date.now() - begin < 15000) setTimeout(choose, 100);
  };
  choose();
}
