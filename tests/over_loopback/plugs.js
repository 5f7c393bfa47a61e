// Simulated plugs: `node plugs.js MODEL DELAY_MS PORT`. Prints its port; a line on stdin sets the watts of each outlet,
// and the end of stdin ends it, so that no plug outlives the test that started it.
const { Device } = require('tplink-smarthome-simulator');
const readline = require('readline');

const [model, delay, port] = process.argv.slice(2);
const device = new Device({ model, address: '127.0.0.1', port: Number(port), responseDelay: Number(delay) });
device.deviceNetworking.on('error', () => {}); // a client that goes away is no reason to end
const meters = () => (device.children ? device.children.map((each) => each.emeter) : [device.data.emeter]);

device.start().then(() => console.log(device.port));
readline.createInterface({ input: process.stdin }).on('line', (line) => {
  line.split(' ').forEach((watts, outlet) => { meters()[outlet].realtime.power = Number(watts); });
  console.log('set');
}).on('close', () => process.exit());
